"""Numbers of one configuration from its runs, and against the best chain."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.lab.bench.material import Prompt
from outrider.lab.bench.notes import RunNote, notes_of, pair
from outrider.lab.bench.plan import Place
from outrider.lab.bench.stages import CellState
from outrider.lab.configuration import Configuration
from outrider.lab.reasoning.confirm import Entry, contestant, tokens_per_step, versus
from outrider.lab.workload.types import Request
from tests.unit.lab.bench.fakes import trace_of


def note(number: int, prompt: int, takes: Sequence[int], step_s: float, plain_s: float = 0.1) -> RunNote:
    """A run of configuration `number`, compared with plain decoding of the same text."""
    total = sum(takes)
    trace = trace_of(takes, [step_s] * len(takes), tokens=list(range(total)))
    plain = trace_of([1] * total, [plain_s] * total, tokens=list(range(total)))
    found = notes_of([trace], number, [prompt], 0, 1)[0]
    return found.model_copy(update={"pairing": pair(plain, trace)} if number else {})


def test_tokens_per_step() -> None:
    found = tokens_per_step([note(1, 0, [1, 3, 2], 0.1), note(1, 1, [4, 4], 0.1), note(1, 0, [2, 4], 0.1)])
    assert found is not None
    assert found.value == 20 / 7
    assert found.low < found.value < found.high


def test_versus_counts_seconds_per_token_behind_the_first_step() -> None:
    """The reference takes 5 tokens in 2 x 0.2 s, the other 4 in 2 x 0.1 s (its first step took one more)."""
    reference, own = note(1, 0, [1, 2, 3], 0.2), note(2, 0, [2, 2, 2], 0.1)
    found = versus([reference], [own])
    assert found is not None
    assert found.value == pytest.approx((0.4 / 5) / (0.2 / 4))
    assert found.num_prompts == 1
    assert versus([reference], [note(2, 7, [2, 2, 2], 0.1)]) is None  # another problem
    assert versus([reference], [note(2, 0, [6], 0.1)]) is None  # nothing behind its first step


def state(notes: list[RunNote], temperature: float) -> CellState:
    requests = [Request(f"p{number}", prompt="?") for number in range(2)]
    prompts = [Prompt(number, one, [1], 10) for number, one in enumerate(requests)]
    return CellState(Place("reasoning", temperature, 1, None), prompts, notes)


def numbers(temperature: float, number: int = 2) -> Any:
    runs = [note(0, 0, [1] * 6, 0.1), note(0, 1, [1] * 8, 0.1)]
    runs += [note(1, 0, [1, 2, 3], 0.2), note(1, 1, [2, 3, 3], 0.2)]
    runs += [note(2, 0, [2, 2, 2], 0.1), note(2, 1, [2, 2, 2, 2], 0.1)]
    found = state(runs, temperature)
    entry = Entry(Configuration("suffix", 8), "idea", "copy")
    return contestant(entry, found, number, 0, found.of(1), cast(Any, SimpleNamespace(decode=str)))


def test_a_contestant() -> None:
    found = numbers(0.0)
    assert (found.configuration, found.role, found.what, found.num_draft_tokens) == ("suffix k=8", "idea", "copy", 8)
    assert found.num_problems == 2
    assert found.tau.value == 14 / 7
    assert found.speedup.value == pytest.approx(10 * 0.1 / (5 * 0.1))  # 4 + 6 tokens behind the first step, in 2 + 3 steps
    seconds = (0.2 / 4 * 5, 0.3 / 6 * 6)
    assert found.over_best.value == pytest.approx(0.8 / sum(seconds))
    assert found.tokens_per_s == pytest.approx(10 / 0.5)
    assert found.identity.num_identical == 2


def test_drawn_texts_are_not_compared_and_the_best_not_with_itself() -> None:
    assert numbers(1.0).identity is None
    assert numbers(1.0, number=1).over_best is None
