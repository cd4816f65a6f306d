"""A random pair over 300 words, saved as checkpoints, and a function that opens it with any
options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.build import Options
from outrider.drafters import DRAFTERS
from outrider.lab.certify.subject import Subject
from outrider.models.lm import PassLimits
from outrider.registry import Entry
from outrider.verifiers import VERIFIERS
from tests.helpers import disturbed, save_checkpoint, tiny_llama, word_tokenizer

V = 300
BROKEN = "tests.unit.lab.certify.broken"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# repetitive: n-grams are found
PROMPTS = [[5, 9, 5, 9, 5], [17, 2, 44, 17, 2], [101, 7, 8, 7, 8, 7], [250, 3, 250, 3]]


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft folders."""
    root = tmp_path_factory.mktemp("certify")
    target = tiny_llama(V, seed=3, sharpness=2.0, **SIZES)
    models = {"target": target, "draft": disturbed(target, 0.3)}
    for name, model in models.items():
        save_checkpoint(root / name, model, word_tokenizer(V))
    return root / "target", root / "draft"


Open = Callable[..., Subject]


@pytest.fixture
def open_subject(tiny_pair: tuple[Path, Path]) -> Open:
    """`Subject.open` on the tiny pair; the draft joins where the drafter wants one."""
    torch.set_num_threads(1)

    def opened(drafter: str = "draft-model", verifier: str = "auto", **options: object) -> Subject:
        draft = str(tiny_pair[1]) if drafter in ("draft-model", "withholding", "flattens") else None
        subject = Subject.open(
            Options(
                target=str(tiny_pair[0]),
                drafter=drafter,
                draft=draft,
                verifier=verifier,
                dtype="float32",
                **options,
            )
        )
        for loaded in filter(None, (subject.built.target, subject.built.draft)):
            # whole batches in one pass: quick, and fp32 leaves no near-ties here
            loaded.lm.limits = PassLimits()
        return subject

    return opened


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faulty parts, registered as built-ins of this test."""
    for name, made in (
        ("resamples", "ResamplesFromTarget"),
        ("drops", "DropsUnlikely"),
        ("clips", "ClipsRare"),
        ("own-dice", "OwnDice"),
        ("position-keyed", "KeyedByPosition"),
        ("raises", "RaisesOnMixed"),
        ("not-invariant", "NotInvariant"),
        ("resamples-late", "ResamplesLate"),
    ):
        monkeypatch.setitem(VERIFIERS._builtin, name, Entry(f"{BROKEN}:{made}", "faulty"))
    monkeypatch.setitem(
        DRAFTERS._builtin, "withholding", Entry(f"{BROKEN}:WithholdingDrafter", "faulty")
    )
    monkeypatch.setitem(
        DRAFTERS._builtin, "flattens", Entry(f"{BROKEN}:FlattensItsReport", "faulty")
    )


@pytest.fixture
def shorter_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts of 200 tokens, more of them: fewer steps for as many draws."""
    monkeypatch.setattr("outrider.lab.certify.sampled.LATEST", 200)
