"""A start that takes over what an earlier one kept: no module, no transformers, and the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider import LLM, SamplingParams
from outrider.cache import cache_folder, keep_json
from outrider.engine import step_costs
from outrider.models.lm import LM
from outrider.models.loading.read_card import card_of
from outrider.models.probes.probe import probe_logits
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.runtime import library, program_text
from outrider.runtime.first_start import nothing_ships
from outrider.runtime.lower import lower
from outrider.runtime.rotary import rotary_of, waves_of
from outrider.serve.observability import monitoring
from outrider.serve.observability.selftest import SelfTest
from tests.contract.own_cache_families import make as own_cache_family
from tests.gguf_files import VOCABULARY_SIZE, Kind, write_model
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.runtime.families import FAMILIES
from tests.unit.runtime.families import make as family

HEAVY = ("transformers", "huggingface_hub", "gguf", "scipy", "accelerate", "sympy")
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(autouse=True)
def without_starts_that_ship() -> Iterator[None]:
    """A first start is one by transformers here; `test_first_start.py` compares those that ship."""
    with nothing_ships():
        yield


@pytest.fixture(params=["safetensors", "gguf"])
def model(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    library_path: Path,
) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    if request.param == "gguf":
        return a_gguf(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return save_checkpoint(
        tmp_path / "model", tiny_llama(len(tokenizer), sharpness=4.0).bfloat16(), tokenizer
    )


def a_gguf(folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.float32).eval()
    return write_model(folder / "model.gguf", made, "llama", kind=Kind.Q4_1)


def start(model: Path | str, **options: Any) -> LLM:
    return LLM(model, drafter="none", threads=1, **options)


def says(llm: LLM) -> tuple[str, bytes]:
    """A text, and logits to the bit."""
    lm: LM = llm._built.target.lm
    bits = probe_logits(lm).contiguous().view(torch.uint8).numpy().tobytes()
    return llm.generate("abc", PARAMS)[0].text, bits


def starts() -> list[Path]:
    return list((cache_folder() / "starts").glob("*.json"))


def no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*unused: object, **also_unused: object) -> None:
        raise AssertionError("loaded as the first time")

    for name in ("load_module", "load_config", "load_tokenizer"):
        monkeypatch.setattr(f"outrider.loader.{name}", fails)


@pytest.mark.slow
def test_a_second_start_makes_no_module_and_has_the_same_bits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a program, weights, tables or tokens that are others when they are read back."""
    first = start(model)
    expected = says(first)
    tokens = first._built.target.tokenizer("Zwölf 🙂 <b>")["input_ids"]
    no_module(monkeypatch)
    second = start(model)
    assert says(second) == expected
    assert (second.config, second.notes) == (first.config, first.notes)
    assert second._built.target.eos_token_ids == first._built.target.eos_token_ids
    assert second.memory["target"] == first.memory["target"]
    assert second._built.target.tokenizer("Zwölf 🙂 <b>")["input_ids"] == tokens
    assert isinstance(second._built.target.tokenizer, ModelTokenizer)
    assert second._built.target.card == first._built.target.card


@pytest.mark.slow
def test_a_model_of_the_hub_starts_as_it_was_kept_until_its_commit_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_path: Path
) -> None:
    """Catches a hub id that starts anew each time, and one that keeps an older commit's weights."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("outrider.models.loading.hub._answers", lambda endpoint, minute: False)
    repository = tmp_path / "hub" / "models--me--tiny"
    tokenizer = byte_tokenizer()
    (repository / "refs").mkdir(parents=True)
    texts = []
    for commit, sharpness in (("a" * 40, 4.0), ("b" * 40, 2.5)):
        module = tiny_llama(len(tokenizer), sharpness=sharpness).bfloat16()
        save_checkpoint(repository / "snapshots" / commit, module, tokenizer)
        (repository / "refs" / "main").write_text(commit)
        texts.append(says(start("me/tiny", revision="main")))
        with monkeypatch.context() as patched:
            no_module(patched)
            kept = start("me/tiny", revision="main")
            source = kept._built.target.source
            assert source is not None
            assert (says(kept), source.revision) == (texts[-1], "main")
    assert texts[0] != texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["start", "tokenizer", "findings"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_file_changes_nothing(model: Path, what: str, damage: str) -> None:
    """It is made anew. A digit that another one has replaced is damage, too, though the file can be
    read."""
    expected = says(start(model))
    folder = {"start": "starts", "tokenizer": "tokenizers", "findings": "checked"}[what]
    (file,) = (cache_folder() / folder).glob("*.json")
    text = file.read_text(encoding="utf-8")
    if damage == "gone":
        file.unlink()
    else:
        file.write_text(text[:-20] if damage == "cut" else text.replace("1", "2"), encoding="utf-8")
    assert says(start(model)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weights", "label", "dtype", "heads"])
def test_another_model_starts_as_the_first_time(
    model: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that changed, what loading was given, and whoever needs the module itself."""
    start(model)
    no_module(monkeypatch)
    options: dict[str, Any] = {}
    if what == "weights":
        os.utime(model if model.is_file() else model / "model.safetensors", ns=(1, 1))
    elif what == "label":
        monkeypatch.chdir(model.parent)
        model = Path(model.name)
    elif what == "dtype":
        options["dtype"] = "float32"
    else:
        options["drafter"] = "quantised"
    with pytest.raises(AssertionError, match="as the first time"):
        LLM(model, threads=1, **{"drafter": "none", **options})


@pytest.mark.slow
def test_the_card_of_a_later_start_is_the_first_ones(model: Path) -> None:
    """Catches a value that JSON makes another one of, and a card of another model."""
    first, second = (start(model)._built.target for _ in range(2))
    assert second.card == first.card == card_of(first.config)
    assert second.config is None
    assert (first.card.hidden_size, first.card.vocab_size) == (
        first.config.hidden_size,
        first.config.vocab_size,
    )
    assert first.card.values["model_type"] == first.config.model_type


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": -1},
        {"vocab_size": "7"},
        {"commit": 3},
        {"ties_embeddings": 1},
        {"more": 1},
        {"values": None},
    ],
)
def test_a_card_that_was_altered_is_made_anew(model: Path, change: dict[str, Any]) -> None:
    expected = says(start(model))
    (file,) = (cache_folder() / "starts").glob("*.json")
    content = json.loads(file.read_text().split("\n")[1])
    content["card"] |= change
    keep_json(file, content, max_files=9)  # with the sum that a file has that nobody damaged
    again = start(model)
    assert says(again) == expected
    assert again._built.target.config is not None, "loaded as the first time"


@pytest.mark.slow
def test_a_command_imports_no_transformers(model: Path) -> None:
    """Its modelling code takes half of what a first answer takes, its own package a tenth."""
    start(model)
    code = (
        "import sys; from outrider.cli.app import run; "
        f"code = run(['generate', {str(model)!r}, 'abc', '--drafter', 'none', '--threads', '1', '--max-tokens', '4']); "
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    absent = "['gguf']" if model.is_file() else "[]"
    assert done.stdout.splitlines()[-1] == f"HEAVY {absent}", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apertus", "kimi_linear"])
def test_scalars_and_experts_of_other_names_are_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_path: Path
) -> None:
    """Apertus has parameters of one number without dimensions; transformers' table escapes the dots
    of Kimi Linear's experts."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    made = family(name) if name in FAMILIES else own_cache_family(name)
    folder = save_checkpoint(tmp_path / "model", made, word_tokenizer(97))
    expected = start(folder, dtype="float32").generate([[3, 4, 5]], PARAMS)[0].token_ids
    assert not list((cache_folder() / "weights").glob("*"))  # experts are in the checkpoint
    no_module(monkeypatch)
    assert start(folder, dtype="float32").generate([[3, 4, 5]], PARAMS)[0].token_ids == expected


WHERE_KEEPING_FAILS = (
    "outrider.runtime.program_text.written", "outrider.runtime.kept.asdict", "outrider.runtime.kept.waves_of",
    "outrider.runtime.kept.find_stored", "outrider.runtime.kept._keep_tokenizer", "outrider.runtime.kept.keep_json",
    "outrider.runtime.checked.keep_json", "outrider.models.loading.tensor_store.TensorTargets",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE_KEEPING_FAILS)
@pytest.mark.parametrize("error", [TypeError("view()\nexpected"), OSError("disk full")])
def test_a_start_works_though_it_cannot_be_kept(
    where: str,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    library_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever fails, wherever: one line says so, and the next start is as the first."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    made = family("qwen3_moe") if "TensorTargets" in where else tiny_llama(97, sharpness=4.0)
    folder = save_checkpoint(tmp_path / "model", made, word_tokenizer(97))

    def fails(*unused: object, **also_unused: object) -> None:
        raise error

    monkeypatch.setattr(where, fails)
    caplog.set_level("INFO", "outrider.cache")
    texts = [
        start(folder, dtype="float32").generate([[3, 4, 5]], PARAMS)[0].token_ids for _ in range(2)
    ]
    assert texts[0] == texts[1]
    lines = [record for record in caplog.records if record.name == "outrider.cache"]
    assert {record.levelname for record in lines} == {
        "INFO" if isinstance(error, OSError) else "WARNING"
    }
    assert all(
        "not kept for the next start" in line.getMessage() and "\n" not in line.getMessage()
        for line in lines
    )


@pytest.mark.parametrize("error", [TypeError("no JSON"), OSError("disk full")])
def test_costs_tests_and_hashes_that_cannot_be_kept_fail_nothing(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Everything else that a start keeps for the next one."""

    def fails(*unused: object, **also_unused: object) -> None:
        raise error

    for part in (step_costs, monitoring):
        monkeypatch.setattr(part, "keep_json", fails)
    caplog.set_level("INFO", "outrider.cache")
    step_costs.StepTimes({}).save()
    monitoring.keep_test({}, SelfTest([], {}))
    kept = [line.getMessage().split(":")[0] for line in caplog.records]
    assert kept == ["what steps take", "the self-test"]


@pytest.mark.slow
def test_a_start_that_was_kept_and_cannot_be_read_is_made_anew(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It failed each time, until somebody emptied the cache."""
    expected = says(start(model))

    def fails(*unused: object) -> None:
        raise KeyError("lm_head.weight")

    monkeypatch.setattr("outrider.runtime.kept.read_stored", fails)
    assert says(start(model)) == expected
    assert (
        "is loaded as the first time: what an earlier start kept cannot be read: KeyError: 'lm_head.weight'"
        in caplog.text
    )


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "cohere", "gpt_neox", "gpt2", "gpt_oss", "mimo_v2_flash"]
)
def test_programs_and_rotary_tables_are_read_back(name: str) -> None:
    """Rotary numbers of several kinds: beside one another, of a part of the head, several tables,
    none; attention sinks."""
    module = family(name)
    program = lower(module)
    again = program_text.read(json.loads(json.dumps(program_text.written(program))))
    assert (again.values, again.body, again.head, again.logits) == (
        program.values,
        program.body,
        program.head,
        program.logits,
    )
    assert (again.signals, again.hidden_size) == (program.signals, program.hidden_size)
    assert all(
        torch.equal(again.constants[name], constant) for name, constant in program.constants.items()
    )
    waves = waves_of(module, program, 512)
    assert waves is not None
    positions = torch.arange(5000, 5100)
    for wave, maker in zip(waves, rotary_of(module, program).makers, strict=True):
        assert torch.equal(wave(positions), maker(positions))
