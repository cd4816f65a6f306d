"""A first start from what ships: the same record as by transformers, the same bits, and no
transformers imported; every other file starts as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from outrider import LLM, SamplingParams
from outrider.models.gguf.tokenizer import gguf_tokenizer, plain_tokenizer
from outrider.models.source import resolve
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.runtime import library
from tests.gguf_files import VOCABULARY_SIZE, write_model
from tests.unit.runtime.first_starts import check_imports, check_record, ships

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)


def a_file(folder: Path, architecture: str = "llama", **given: Any) -> Path:
    """A model of this architecture in blocks; `given`: of its config, or of `write_model`."""
    of_file = {name: given.pop(name) for name in ("kind", "changes", "tensors") if name in given}
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "initializer_range": 0.2,
        "tie_word_embeddings": True, "head_dim": 16, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIGS[architecture](**{**sizes, **given})
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return write_model(folder / "model.gguf", made, architecture, **{"kind": Kind.Q4_1, **of_file})


CASES: dict[str, Callable[[Path], Path]] = {
    "llama": a_file,
    "llama, own output layer": lambda folder: a_file(folder, tie_word_embeddings=False),
    "llama, as many keys as queries": lambda folder: a_file(folder, num_key_value_heads=4),
    "llama 3's frequencies": lambda folder: a_file(
        folder, tensors={"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    ),
    "llama, another base and epsilon, sampling": lambda folder: a_file(
        folder,
        rms_norm_eps=1e-6,
        changes={
            "llama.rope.freq_base": 500000.0,
            "general.sampling.temp": 0.6,
            "general.sampling.top_k": 20,
        },
    ),
    "llama, formats mixed": lambda folder: a_file(
        folder, kind=lambda name: Kind.Q8_0 if "ffn_down" in name else Kind.Q5_0
    ),
    "qwen2": lambda folder: a_file(folder, "qwen2", num_hidden_layers=2),
    "qwen3": lambda folder: a_file(
        folder, "qwen3", head_dim=32, changes={"qwen3.attention.key_length": 32}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_record_is_the_one_that_transformers_gives(name: str, tmp_path: Path) -> None:
    """Program, tables, places of weights, card, notes, limits and tokenizer; then the same text."""
    check_record(CASES[name](tmp_path))


OTHERS: dict[str, Callable[[Path], Path]] = {
    "matrices that are in no blocks": lambda folder: a_file(folder, kind=Kind.F32),
    "one head of keys": lambda folder: a_file(folder, num_key_value_heads=1),
    "one layer": lambda folder: a_file(folder, num_hidden_layers=1),
    "a tensor that no Llama has": lambda folder: a_file(
        folder, tensors={"blk.0.more.weight": np.ones(4, np.float32)}
    ),
    "positions that are scaled": lambda folder: a_file(
        folder, changes={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    ),
    "positions that are scaled in an unknown way": lambda folder: a_file(
        folder, changes={"llama.rope.scaling.type": "other", "llama.rope.scaling.factor": 2.0}
    ),
    "a part of a head rotated": lambda folder: a_file(
        folder, changes={"llama.rope.dimension_count": 8}
    ),
    "sizes that its tensors do not have": lambda folder: a_file(
        folder, changes={"llama.feed_forward_length": 128}
    ),
    "a size that is no number": lambda folder: a_file(
        folder, changes={"llama.feed_forward_length": "many"}
    ),
    "a tokenizer beside it": lambda folder: with_tokenizer(a_file(folder)),
    "a vocabulary of pieces": lambda folder: a_file(
        folder, changes={"tokenizer.ggml.model": "llama"}
    ),
    "a rule that nobody knows": lambda folder: a_file(folder, changes={"tokenizer.ggml.pre": "x"}),
}


def with_tokenizer(file: Path) -> Path:
    (file.parent / "tokenizer.json").write_text("{}", encoding="utf-8")
    return file


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_start_as_ever(name: str, tmp_path: Path) -> None:
    assert not ships(OTHERS[name](tmp_path))


def test_a_start_in_fp32_and_one_whose_module_is_needed_are_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider import loader

    asked: list[Any] = []
    monkeypatch.setattr(loader, "first_start", lambda *given: asked.append(given))
    file = str(a_file(tmp_path))
    LLM(file, drafter="none", dtype="float32")
    LLM(file, drafter="none", runtime="eager")
    assert not asked
    LLM(file, drafter="none")
    assert len(asked) == 1


def test_the_first_command_ever_imports_no_transformers(tmp_path: Path) -> None:
    """Nothing is kept yet."""
    check_imports(str(a_file(tmp_path)), "drafter='none'")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.pre": "llama-bpe"},
        {"tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 0},
    ],
)
def test_the_plain_tokenizer_is_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """One made without transformers has the same record, to the last token."""
    source = resolve(str(a_file(tmp_path, changes=changes)))
    assert source.gguf is not None
    plain = plain_tokenizer(source.gguf)
    whole = ModelTokenizer.of(gguf_tokenizer(source.gguf))
    assert plain is not None
    assert whole is not None
    for part, entry in whole.record.items():
        assert plain.record[part] == entry, part
    assert plain.whole.get_vocab() == plain.get_vocab()
