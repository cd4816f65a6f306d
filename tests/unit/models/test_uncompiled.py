"""Why a model runs uncompiled: the note must name the true reason, and a remedy that works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.llm import LLM
from outrider.models import compile as compiling
from outrider.models.compiled import why_uncompiled
from outrider.models.load import build_lm, load_config, load_module
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model without programs, in a cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "cannot_compile", lambda: None)
    return save_checkpoint(tmp_path / "model", tiny_llama(40), word_tokenizer(40))


def compiled_for(model: Path, num_threads: int) -> None:
    """A file where the program of its pass would be. It is never opened."""
    module = load_module(str(model), load_config(str(model)), torch.float32, CPU)
    lm = build_lm(module, str(model), torch.float32, CPU)
    file = compiling.package_files(lm, module, "pass-hidden")(num_threads)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def test_programs_for_another_number_of_threads(model: Path) -> None:
    """It said "--compile on is faster" to someone who had compiled, and gave --threads."""
    compiled_for(model, 2)
    assert LLM(model, drafter="none", dtype="float32", threads=1).notes[0] == (
        "running uncompiled: the compiled programs are for 2 threads, and this run has 1 "
        "(--threads 2 uses them, --compile on makes some for 1, once)"
    )


def test_no_programs_at_all(model: Path) -> None:
    assert LLM(model, drafter="none", dtype="float32", threads=1).notes[0] == (
        "running uncompiled; --compile on is faster (compiles once per model, a minute or two)"
    )


def test_no_compiler(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--compile on would end in an error: it is no advice."""
    monkeypatch.setattr(compiling, "cannot_compile", lambda: "no C++ compiler found (install g++)")
    assert LLM(model, drafter="none", dtype="float32", threads=1).notes[0] == (
        "running uncompiled, which is slower: no C++ compiler found (install g++)"
    )
    assert why_uncompiled([1, 4]).endswith("(--threads 4 uses them)")
