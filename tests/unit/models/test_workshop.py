"""The workshop of programs: what is made, what is only taken, and what makes another program of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.models import workshop
from outrider.models.workshop import Mode, Workshop

Weights = dict[str, Tensor]


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files loaded, in order; a "program" here returns its file's text."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    loaded: list[Path] = []

    def load(path: Path) -> object:
        loaded.append(path)
        return path.read_text

    monkeypatch.setattr(workshop, "load_program", load)
    return loaded


class Shop:
    """A workshop with what it told the user, and what it was made to make."""

    def __init__(self, mode: Mode) -> None:
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.made: list[Path] = []
        self._shop = Workshop(mode, self.lines.append, self.notes)

    def text(self, facts: tuple[object, ...] = (1,), weights: Weights | None = None) -> str | None:
        def make(path: Path) -> None:
            self.made.append(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"program {facts}")

        program = self._shop.program("test", facts, weights or {"w": torch.zeros(2, 3)}, "a head", make)
        return None if program is None else program()


def test_on_makes_what_is_missing_once(loads: list[Path]) -> None:
    """Catches a program made or loaded again for every decoder, and one made where a stored one was there."""
    first, second = Shop("on"), Shop("on")
    assert [first.text(), first.text(), second.text()] == ["program (1,)"] * 3
    assert (len(first.made), len(second.made), len(loads)) == (1, 0, 2)
    assert first.lines == ["compiling a head: once per machine, a minute or so"]
    assert second.lines == first.notes == []


def test_auto_takes_what_is_there_and_says_so_where_nothing_is(loads: list[Path]) -> None:
    """Catches an `auto` that compiles for a minute unasked, that is silent about being slow, or says it once a decoder."""
    shop = Shop("auto")
    assert shop.text() is None
    assert shop.text() is None
    assert len(shop.notes) == 1
    assert "--compile on" in shop.notes[0]
    assert shop.made == loads == []
    Shop("on").text()
    assert shop.text() == "program (1,)"


def test_other_facts_weights_or_threads_are_another_program(loads: list[Path]) -> None:
    """Catches a stored program used for a head it was not made of: wrong drafts, and nothing that says so."""
    shop, ones = Shop("on"), torch.ones(2, 3)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for facts in ((1,), (2,)):
                for weights in ({"w": ones}, {"w": ones.view(3, 2)}, {"v": ones}, {"w": 2 * ones}, {"w": ones.bfloat16()}):
                    assert shop.text(facts, weights) == f"program {facts}"
    finally:
        torch.set_num_threads(before)
    assert len(set(loads)) == len(loads) == 20
