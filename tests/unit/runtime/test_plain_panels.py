"""Later starts of models of plain weights map their panels, and have the bits of the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.cache import cache_folder, kept_json
from outrider.errors import ConfigError
from outrider.models.loading import kept_weights
from outrider.models.probes.probe import probe_logits
from outrider.runtime import kept_panels, library
from outrider.runtime.coding import ALWAYS, NEVER, SWITCH
from outrider.runtime.matrices import PackedWeight
from outrider.runtime.plain_panels import PlainPanels
from outrider.runtime.structures import WeightFormat
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.models.loading.test_kept_weights import is_mapped
from tests.unit.runtime.families import make as family

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WORDS = 97
CODED, BF16, FP32 = (
    WeightFormat.PANELS_CODED,
    WeightFormat.PANELS_BF16,
    WeightFormat.PANELS_FP32,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_path: Path) -> None:
    """A system that keeps files in huge pages, with a cache folder of its own."""
    steps = iter(range(0, 1 << 60, 1 << 40))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    monkeypatch.setattr(kept_weights, "_huge_bytes", lambda: next(steps))
    monkeypatch.setattr(kept_weights, "is_local", lambda folder: True)
    monkeypatch.setattr(kept_weights, "PROBE", 1)
    monkeypatch.setattr(kept_panels, "is_mapped_huge", lambda folder: True)
    monkeypatch.setattr(kept_panels, "unthrottled_bytes", lambda: 1 << 30)
    monkeypatch.setattr(kept_panels, "LEAST", 1)


def checkpoint(folder: Path, name: str) -> Path:
    if name == "tied":
        model = tiny_llama(WORDS, tie_word_embeddings=True).bfloat16()
    else:
        model = family(name.removesuffix(" fp32"), torch.bfloat16)
    return save_checkpoint(folder, model, word_tokenizer(WORDS))


def start(model: Path, name: str) -> LLM:
    dtype = "float32" if name.endswith("fp32") else "bfloat16"
    return LLM(model, drafter="none", threads=1, dtype=dtype)


def bits(llm: LLM) -> tuple[list[int], torch.Tensor]:
    logits = probe_logits(llm._built.target.lm).view(torch.int32)
    return llm.generate([[3, 4, 5]], PARAMS)[0].token_ids, logits


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weights that are given in panels from now on."""
    found: list[Any] = []
    put_into = PlainPanels.put_into

    def watched(self: PlainPanels, tensors: Any) -> Any:
        result = put_into(self, tensors)
        for name, each in result.items():
            if isinstance(each, PackedWeight):
                found.append((each, name in tensors))
        return result

    monkeypatch.setattr(PlainPanels, "put_into", watched)
    return found


def makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*unused: object, **also_unused: object) -> None:
        raise AssertionError("panels are made again")

    for name in ("outrider.runtime.plain_panels.layers_panels", "outrider.runtime.binding.packed"):
        monkeypatch.setattr(name, fails)


@pytest.mark.slow
@pytest.mark.parametrize("coded", [ALWAYS, NEVER])
@pytest.mark.parametrize("name", ["tied", "llama", "gpt2", "qwen3_moe", "gpt_oss", "llama fp32"])
def test_a_later_start_makes_no_panels_and_has_the_same_bits(
    name: str, coded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, coded)
    model = checkpoint(tmp_path / "model", name)
    first = bits(start(model, name))
    second = bits(start(model, name))
    found = recorded(monkeypatch)
    makes_nothing(monkeypatch)
    third = bits(start(model, name))
    assert first[0] == second[0] == third[0]
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[1], third[1])
    kinds = {weight.format for weight, _ in found}
    if name.endswith("fp32"):
        assert kinds == {FP32}
    else:
        assert (CODED if coded == ALWAYS else BF16) in kinds
    read = [weight for weight, was_read in found if was_read]
    assert len(read) == (1 if name in ("tied", "gpt2") and coded == NEVER else 0)


@pytest.mark.slow
def test_weights_are_packed_from_the_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy of a model's weights lies next to their panels, and the estimate says so: a model
    that takes more than half of the memory starts."""
    model = checkpoint(tmp_path / "model", "tied")
    given: dict[str, bool] = {}
    put_into = PlainPanels.put_into

    def watched(self: PlainPanels, tensors: dict[str, torch.Tensor]) -> Any:
        for name in self.only_packed & tensors.keys():
            given[name] = is_mapped(tensors[name], model / "model.safetensors")
        return put_into(self, tensors)

    monkeypatch.setattr(PlainPanels, "put_into", watched)
    start(model, "tied")
    again = start(model, "tied")
    assert given
    assert all(given.values())
    memory = again.memory["target"]
    table = WORDS * again._built.target.card.hidden_size * 2
    assert again.memory["weights_bytes"] == memory["weights_bytes"] + table


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama fp32", "qwen3_moe"])
def test_weights_that_are_copied_count_twice(name: str, tmp_path: Path) -> None:
    """Numbers of another type, and layers of experts that are put together, are not mapped."""
    model = checkpoint(tmp_path / "model", name)
    start(model, name)
    assert start(model, name).memory["copies"] == (1 if name == "llama" else 2)


@pytest.mark.slow
def test_a_wrong_switch_is_refused_at_a_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kept_panels.SWITCH, "nver")
    with pytest.raises(ConfigError, match="Did you mean 'never'"):
        start(checkpoint(tmp_path / "model", "gpt2"), "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("coded", [ALWAYS, NEVER])
def test_panels_of_another_size_are_not_used(
    coded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums can be right: the executor would read what is not there."""
    monkeypatch.setenv(SWITCH, coded)
    model = checkpoint(tmp_path / "model", "llama")
    expected = bits(start(model, "llama"))
    bits(start(model, "llama"))
    (table,) = (cache_folder() / "weights").glob("*-0.json")
    file = table.with_suffix(kept_weights.SUFFIX)
    content = kept_json(table)
    (kept,) = [kept_weights.kept_weights(file, content["key"])]
    kept_weights.keep_weights(
        file, content["key"], {name: each[:-1] for name, each in kept.items()}
    )
    found = recorded(monkeypatch)
    again = bits(start(model, "llama"))
    assert again[0] == expected[0]
    assert torch.equal(again[1], expected[1])
    assert all(weight.is_whole for weight, _ in found)
