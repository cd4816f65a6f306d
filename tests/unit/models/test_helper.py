"""A second process compiles some of the programs: who makes what, and what happens when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from outrider.models import compile as compiling
from outrider.models import compiled, helper, native
from outrider.models.compiled import CompiledModel
from outrider.models.helper import Helper, Job, share
from outrider.models.load import LoadedModel, build_lm
from tests.helpers import tiny_llama

VOCAB = 40
LENGTHS = (8, 5, 3, 2, 1)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(helper, "MEMORY", 0)


@pytest.mark.usefixtures("two_cores")
def test_both_are_done_at_about_the_same_time() -> None:
    theirs = share(LENGTHS)
    seconds = {length: helper.BASE + helper.TOKEN * length for length in LENGTHS}
    mine = helper.PASS + sum(seconds[length] for length in LENGTHS if length not in theirs)
    other = helper.START_UP + sum(seconds[length] for length in theirs)
    assert abs(mine - other) < 0.2 * (mine + other)


def test_one_program_needs_no_helper(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share((5,)) == share(()) == ()
    monkeypatch.setattr(helper, "MEMORY", 1 << 60)
    assert share(LENGTHS) == ()
    monkeypatch.setattr(helper, "MEMORY", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert share(LENGTHS) == ()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledModel:
    """One whose programs are empty files."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "compile_pass", lambda lm, module, path, signals: _touch(path))
    module = tiny_llama(VOCAB)
    lm = build_lm(module, "tiny", torch.float32, torch.device("cpu"))
    loaded = LoadedModel("tiny", lm, module.config, None, frozenset())
    return CompiledModel(loaded, module, False, LENGTHS, VOCAB, can_help=True)


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize("fails", [False, True], ids=["helps", "fails"])
def test_every_program_is_made_once(
    model: CompiledModel, fails: bool, two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that the helper did not make: catches a program that is missing, or made twice."""
    made: list[int] = []
    asked: list[Job] = []

    class Fake:
        def __init__(self, job: Job) -> None:
            asked.append(job)

        def wait(self) -> None:
            for length in () if fails else asked[0].lengths:
                _touch(model._loop_paths[length])

        stop = wait

    def compile_loop(lm: Any, module: Any, length: int, vocab_size: int, path: Path) -> None:
        made.append(length)
        _touch(path)

    monkeypatch.setattr(compiled, "Helper", Fake)
    monkeypatch.setattr(compiled, "compile_draft_loop", compile_loop)
    model._make()
    (job,) = asked
    assert (job.name, job.dtype, job.loop_vocab) == ("tiny", "float32", VOCAB)
    assert job.lengths
    expected = LENGTHS if fails else set(LENGTHS) - set(job.lengths)
    assert sorted(made) == sorted(expected)
    assert not model.missing()


def test_a_helper_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, or when its patience is at an end, nothing of it goes on."""
    helpers = [Helper(Job("nothing", "float32", 1, VOCAB, (1,))) for _ in range(2)]
    monkeypatch.setattr(helper, "PATIENCE_S", 0.0)
    helpers[0].stop()
    helpers[1].wait()
    helpers[0].stop()  # once more does no harm
    assert all(not psutil.pid_exists(one._process.pid) for one in helpers)


@pytest.mark.slow
@pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")
def test_the_helpers_programs_are_those_asked_for(
    tmp_path: Path, two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one: its files have the names that are looked for, and draft. Catches a helper that always fails, unnoticed."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    module = tiny_llama(VOCAB)
    module.save_pretrained(tmp_path / "model")
    name = str(tmp_path / "model")
    lm = build_lm(module, name, torch.float32, torch.device("cpu"))
    made: list[int] = []
    monkeypatch.setattr(compiled, "compile_draft_loop", _noting(made))
    model = CompiledModel(LoadedModel(name, lm, module.config, None, frozenset()), module, False, (2, 1), VOCAB, can_help=True)
    model.use()
    assert len(made) == 1, "the helper made none, or not in time"
    assert model.loaded.draft_loop is not None
    assert model.loaded.draft_loop.length(3) == 3


def _noting(made: list[int]) -> Callable[..., None]:
    real = compiled.compile_draft_loop

    def compile_loop(lm: Any, module: Any, length: int, vocab_size: int, path: Path) -> None:
        made.append(length)
        real(lm, module, length, vocab_size, path)

    return compile_loop
