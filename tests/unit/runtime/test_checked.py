"""Findings of a start that the next one takes over: what must be the same for that, and what is not
made again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.cache import cache_folder
from outrider.models.lm import LM, PassLimits
from outrider.models.loading import load
from outrider.models.source import resolve
from outrider.runtime import checked, library, limits, run
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_path: Path) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    tokenizer = byte_tokenizer()
    return save_checkpoint(tmp_path / "model", tiny_llama(len(tokenizer), sharpness=4.0), tokenizer)


def start(model: Path, **options: Any) -> LLM:
    return LLM(model, drafter="none", dtype="float32", threads=1, **options)


def kept() -> list[Path]:
    return list((cache_folder() / "checked").glob("*.json"))


def test_a_second_start_checks_nothing_and_says_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches findings that are not found again, and ones that lose a part on the way."""
    first = start(model)
    texts = first.generate("abc", PARAMS)[0].text
    shape = first._built.target.lm.shape
    found = first._built.target.lm.limits
    assert len(kept()) == 1

    def checks(*unused: object) -> None:
        raise AssertionError("checked again")

    for where, name in (
        (load, "find_layers"),
        (load, "check_against_plain"),
        (run, "probe_logits"),
    ):
        monkeypatch.setattr(where, name, checks)
    second = start(model)
    assert (second._built.target.lm.shape, second._built.target.lm.limits) == (shape, found)
    assert second.config == first.config
    assert second.generate("abc", PARAMS)[0].text == texts
    with pytest.raises(AssertionError, match="checked again"):
        start(model, runtime="eager")  # other passes, which nobody has checked


@pytest.mark.slow
def test_pass_limits_of_torchs_modules_are_measured_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches limits that are measured at every start, which takes longer than loading; and limits
    of other kernels, which another number of threads or another variable chooses."""
    measured: list[object] = []
    measure = load.find_pass_limits

    def watched(lm: LM, module: Any) -> PassLimits:
        measured.append(lm)
        return measure(lm, module)

    monkeypatch.setattr(load, "find_pass_limits", watched)
    first = start(model, runtime="eager")._built.target.lm.limits
    assert start(model, runtime="eager")._built.target.lm.limits == first
    assert len(measured) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    start(model, runtime="eager")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    LLM(model, drafter="none", dtype="float32", threads=2, runtime="eager")
    LLM(model, drafter="none", dtype="bfloat16", threads=1, runtime="eager")
    os.utime(model / "model.safetensors", ns=(1, 1))
    start(model, runtime="eager")
    assert len(measured) == 5


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weights", "config", "dtype", "damaged"])
def test_another_model_is_checked_anew(
    model: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(model)
    (record,) = kept()
    passes: list[bool] = []
    real = limits.probe_tokens
    monkeypatch.setattr(limits, "probe_tokens", lambda *a: passes.append(True) or real(*a))
    file = model / ("model.safetensors" if what == "weights" else "config.json")
    if what in ("weights", "config"):
        os.utime(file, ns=(1, 1))
    if what == "damaged":
        record.write_text("{}")
    LLM(model, drafter="none", dtype="bfloat16" if what == "dtype" else "float32", threads=1)
    assert passes == [True]
    assert len(kept()) == (1 if what == "damaged" else 2)


def test_what_files_do_not_tell_apart_has_no_key(tmp_path: Path) -> None:
    """A name on the hub may mean another version tomorrow."""
    assert (
        checked.key_of(resolve("some/model-on-the-hub", fetches=False), None, torch.float32) is None
    )


def test_the_folder_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(checked, "MAX_FILES", 1)
    lm = start(model)._built.target.lm
    (first,) = kept()
    os.utime(first, (1, 1))
    checked.keep("another", checked.Checked(lm.shape, lm.limits))
    assert [file.stem for file in kept()] == ["another"]
    assert checked.find("another") == checked.Checked(lm.shape, lm.limits)
