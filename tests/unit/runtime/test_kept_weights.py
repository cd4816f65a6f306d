"""Second starts of models whose weights loading rounds or repacks, or puts together from layers of
experts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.cache import cache_folder
from outrider.models.loading.kept_weights import SUFFIX, keep_weights
from outrider.models.probes.probe import probe_logits
from outrider.runtime import library
from tests.gguf_files import Kind
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.models.gguf import test_experts
from tests.unit.models.quantised import test_floats, test_load
from tests.unit.runtime.families import make as family

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
REPACKED = ("gptq-4-act-order", "awq", "compressed-int8", "fp8", "gptq-experts", "mxfp4", "rounded")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)


def checkpoint(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint folder, and the options that it is loaded with."""
    if name == "rounded":
        model = tiny_llama(
            96, hidden_size=128, intermediate_size=256, tie_word_embeddings=True
        ).bfloat16()
        return save_checkpoint(folder, model, word_tokenizer(96)), {"quantise": 4}
    if name == "gguf-experts":
        kinds = dict.fromkeys(("gate", "up", "down"), Kind.MXFP4)
        return test_experts.checkpoint(folder.with_suffix(".gguf"), "gpt-oss", kinds)[0], {}
    if name == "experts":
        return save_checkpoint(folder, family("qwen3_moe", torch.bfloat16), word_tokenizer(97)), {}
    if name in test_load.FORMATS:
        return test_load.checkpoint(folder, name)[0], {}
    return test_floats.any_checkpoint(folder, name)[0], {}


def start(model: Path, **options: Any) -> LLM:
    return LLM(model, drafter="none", threads=1, **options)


def bits(llm: LLM) -> tuple[list[int], torch.Tensor]:
    return llm.generate([[3, 4, 5]], PARAMS)[0].token_ids, probe_logits(llm._built.target.lm).view(
        torch.int32
    )


def assert_same(llm: LLM, expected: tuple[list[int], torch.Tensor]) -> None:
    tokens, logits = bits(llm)
    assert tokens == expected[0]
    assert torch.equal(logits, expected[1])


def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*unused: object, **also_unused: object) -> None:
        raise AssertionError("loaded as the first time")

    for name in ("load_module", "load_config", "load_tokenizer", "rounded_bytes"):
        monkeypatch.setattr(f"outrider.loader.{name}", fails)


def weights() -> list[Path]:
    return list((cache_folder() / "weights").glob(f"*{SUFFIX}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REPACKED, "experts", "gguf-experts"])
def test_a_second_start_packs_nothing_and_has_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a checkpoint's own files have, its experts too, has no second copy in the cache."""
    model, options = checkpoint(tmp_path / "model", name)
    first = start(model, **options)
    assert first.config["runtime"] == "native"
    expected = bits(first)
    assert len(weights()) == (name in REPACKED)
    no_loading(monkeypatch)
    second = start(model, **options)
    assert_same(second, expected)
    assert (second.config, second.notes) == (first.config, first.notes)
    assert second.memory["target"] == first.memory["target"]
    assert 1 <= second.memory["copies"] <= first.memory["copies"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "other"])
def test_a_damaged_file_of_weights_is_ignored_and_replaced(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where size and time are those of the file that was kept."""
    model, options = checkpoint(tmp_path / "model", "rounded")
    expected = bits(start(model, **options))
    (file,) = weights()
    state = file.stat()
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "other":
        keep_weights(file, "another start", {"0": torch.zeros(3)})
    else:
        content[-5] ^= 8
        file.write_bytes(content[:-20] if damage == "cut" else content)
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert_same(start(model, **options), expected)
    no_loading(monkeypatch)
    assert_same(start(model, **options), expected)


@pytest.mark.slow
def test_a_checkpoint_that_changed_replaces_the_old_one(tmp_path: Path) -> None:
    model, options = checkpoint(tmp_path / "model", "rounded")
    expected = bits(start(model, **options))
    changed = tiny_llama(
        96, hidden_size=128, intermediate_size=256, tie_word_embeddings=True, sharpness=3.0
    ).bfloat16()
    save_checkpoint(model, changed, word_tokenizer(96))
    assert not torch.equal(bits(start(model, **options))[1], expected[1])
    assert len(weights()) == 1
