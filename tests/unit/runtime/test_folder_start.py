"""First starts of folders from what ships: the same record as by transformers, the same bits, and
no transformers imported; every other folder starts as ever."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from outrider import SamplingParams
from outrider.demo import demo_paths
from outrider.runtime import library
from tests.unit.runtime.first_starts import check_imports, check_record, ships

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)


def a_folder(
    tmp_path: Path,
    model_type: str = "llama",
    *,
    config: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **given: Any,
) -> Path:
    """A model's folder with the demo's tokenizer. `config`: all that config.json has besides the
    sizes, in place of what transformers writes."""
    sizes = {**SIZES, **({} if model_type == "qwen2" else {"head_dim": 32}), **given}
    folder = tmp_path / "model"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = CONFIGS[model_type](**sizes, initializer_range=0.2)
        AutoModelForCausalLM.from_config(made, dtype=dtype).save_pretrained(folder)
    for name in FILES:
        shutil.copy(demo_paths().target / name, folder)
    if config is not None:
        write(folder / "config.json", {"model_type": model_type, **sizes, **config})
    change(folder / "config.json", dtype="bfloat16")
    return folder


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def change(file: Path, **values: Any) -> Path:
    """The folder, with values of a JSON file in it changed; None leaves one out."""
    content = json.loads(file.read_text(encoding="utf-8")) | values
    write(file, {name: value for name, value in content.items() if value is not None})
    return file.parent


OLD = {  # as transformers 4 wrote it
    "torch_dtype": "bfloat16", "rope_theta": 500000.0, "rope_scaling": None, "use_cache": False,
    "transformers_version": "4.40.0", "hidden_act": "silu", "tie_word_embeddings": True,
    "eos_token_id": [1, 7], "attention_dropout": 0.1,
}  # fmt: skip
CASES: dict[str, Callable[[Path], Path]] = {
    "the demo": lambda tmp_path: demo_paths().target,
    "the demo's draft": lambda tmp_path: demo_paths().draft,
    "llama": a_folder,
    "llama, sizes alone": lambda tmp_path: a_folder(tmp_path, config={}),
    "llama, an older config": lambda tmp_path: a_folder(
        tmp_path, config=OLD, tie_word_embeddings=True
    ),
    "llama, heads that share the hidden size": lambda tmp_path: change(
        a_folder(tmp_path, head_dim=16) / "config.json", head_dim=None
    ),
    "llama, stored in fp32": lambda tmp_path: a_folder(tmp_path, dtype=torch.float32),
    "llama, sampling": lambda tmp_path: change(
        a_folder(tmp_path) / "generation_config.json", do_sample=True, temperature=0.6, top_k=20
    ),
    "llama, a template in the settings": lambda tmp_path: with_template(a_folder(tmp_path)),
    "qwen3": lambda tmp_path: a_folder(tmp_path, "qwen3", tie_word_embeddings=True),
    "qwen3, an older config": lambda tmp_path: a_folder(
        tmp_path,
        "qwen3",
        config=OLD | {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 1},
        tie_word_embeddings=True,
    ),
}


def with_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").unlink()
    return change(
        folder / "tokenizer_config.json", chat_template="{{ messages }}", pad_token="</s>"
    )


@pytest.mark.parametrize("name", CASES)
def test_the_record_is_the_one_that_transformers_gives(name: str, tmp_path: Path) -> None:
    """Program, tables, places of weights, card, notes, limits and tokenizer; then the same text."""
    check_record(CASES[name](tmp_path))


def of_config(**values: Any) -> Callable[[Path], Path]:
    return lambda tmp_path: change(a_folder(tmp_path) / "config.json", **values)


def of_tokenizer(**values: Any) -> Callable[[Path], Path]:
    return lambda tmp_path: change(a_folder(tmp_path) / "tokenizer_config.json", **values)


def of_generation(**values: Any) -> Callable[[Path], Path]:
    return lambda tmp_path: change(a_folder(tmp_path) / "generation_config.json", **values)


def with_tensors(tmp_path: Path, **tensors: torch.Tensor) -> Path:
    folder = a_folder(tmp_path)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    return folder


def with_file(tmp_path: Path, name: str, content: str = "{}") -> Path:
    folder = a_folder(tmp_path)
    (folder / name).write_text(content, encoding="utf-8")
    return folder


def without(tmp_path: Path, name: str) -> Path:
    folder = a_folder(tmp_path)
    (folder / name).unlink()
    return folder


OTHERS: dict[str, Callable[[Path], Path]] = {
    "a family whose tokenizer has a class of its own": lambda path: a_folder(path, "qwen2"),
    "another family": of_config(model_type="mistral"),
    "another type": of_config(dtype="float32"),
    "a value that nobody knows": of_config(softcap=30.0),
    "another activation": of_config(hidden_act="gelu"),
    "positions that are scaled": of_config(
        rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    ),
    "a number that is none": of_config(num_hidden_layers="three"),
    "more layers than tensors": of_config(num_hidden_layers=1 << 40),
    "sizes that its tensors do not have": of_config(intermediate_size=128),
    "a token beyond the vocabulary": of_config(pad_token_id=5000),
    "a model that classifies": of_config(architectures=["LlamaForSequenceClassification"]),
    "one layer": lambda path: a_folder(path, num_hidden_layers=1),
    "a window that slides": lambda path: change(
        a_folder(path, "qwen3") / "config.json", use_sliding_window=True, sliding_window=64
    ),
    "layers that differ": lambda path: change(
        a_folder(path, "qwen3") / "config.json", layer_types=["sliding_attention"] * 3
    ),
    "a tensor that no Llama has": lambda path: with_tensors(path, more=torch.ones(4)),
    "a tensor of integers": lambda path: with_tensors(
        path, **{"model.norm.weight": torch.ones(64, dtype=torch.int32)}
    ),
    "no settings of generation": lambda path: without(path, "generation_config.json"),
    "settings of generation that change a text": of_generation(no_repeat_ngram_size=3),
    "outputs that are asked for": of_generation(output_attentions=True),
    "no tokenizer": lambda path: without(path, "tokenizer.json"),
    "a tokenizer's own class": of_tokenizer(tokenizer_class="LlamaTokenizer"),
    "a token put before every text": of_tokenizer(add_bos_token=True),
    "a named token that is not matched whole": of_tokenizer(pad_token="<pad>"),
    "a list of further tokens": lambda path: with_file(path, "added_tokens.json"),
    "a processor": lambda path: with_file(path, "processor_config.json"),
    "a damaged tokenizer": lambda path: with_file(path, "tokenizer.json"),
    "a damaged file": lambda path: with_file(path, "model.safetensors", "no tensors"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_folders_start_as_ever(name: str, tmp_path: Path) -> None:
    assert not ships(OTHERS[name](tmp_path))


def test_the_demos_first_command_ever_imports_no_transformers(tmp_path: Path) -> None:
    """Nothing is kept yet, of the target and of its draft."""
    check_imports("demo")
