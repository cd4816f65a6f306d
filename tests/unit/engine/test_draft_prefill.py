"""What reading a prompt into a draft model costs, reported to the control of what drafts for the
row."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from outrider.draft_length import AutoLength, Goodput
from outrider.draft_length.reading import ReadingPrice
from outrider.drafters.base import Drafter
from outrider.engine.draft_prefill import DraftPrefill
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from outrider.step import StepFacts
from tests.helpers import make_row
from tests.unit.draft_length.simulator import Batch, _draft, _verdict

PACE_S = 1e-4  # to read a token


class Reader:
    """Reads so many tokens a step, on a clock of its own; rows of other drafters have nothing to
    read."""

    def __init__(self, budget: int, clock: list[float]) -> None:
        self.left: dict[int, int] = {}
        self._budget = budget
        self._clock = clock

    def unread(self, rows: list[Row]) -> list[int]:
        return [
            self.left.setdefault(row.request, row.num_prompt if row.drafter == "model" else 0)
            for row in rows
        ]

    def prepare(self, rows: list[Row], gamma: list[int], budget: int) -> list[int]:
        left = self._budget
        for row, count in zip(rows, gamma, strict=True):
            done = min(left, self.left[row.request]) if count else 0
            self.left[row.request] -= done
            left -= done
            self._clock[0] += done * PACE_S
        return [
            0 if self.left[row.request] else count for row, count in zip(rows, gamma, strict=True)
        ]


def row(number: int, prompt: int, drafter: str = "model") -> Row:
    one = make_row([0] * prompt, SamplingParams(max_tokens=100), number=number)
    one.drafter = drafter
    one.stats.steps = 5
    return one


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> DraftPrefill:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    drafter: Any = Reader(200, clock)
    goodputs = {"model": Goodput(4, trees=False), "copy": Goodput(4, trees=False)}
    auto = AutoLength(goodputs, ReadingPrice(drafter.unread))
    return DraftPrefill(cast(Drafter, drafter), auto)


def step(control: DraftPrefill, rows: list[Row], ends: int | None = None) -> list[int]:
    """One step of all rows; all texts end behind it with so many tokens emitted, if `ends` says so."""
    asked = control.choose(cast(Any, Batch(rows)))
    for one in rows if ends is not None else []:
        one.tokens += [0] * (ends or 0)
        one.finish_reason = "length"
    control.observe(
        StepFacts(cast(Any, rows), asked, _draft(asked), _verdict(asked, asked), 1.0, 0.0)
    )
    return asked


def prices(control: DraftPrefill) -> list[float]:
    """Seconds of reading per emitted token, of the draft model and of the look-up."""
    auto = cast(AutoLength, control.control)
    auto.choose(cast(Any, Batch([row(99, 1)])))
    return [goodput.reading_s for goodput in auto.drafters.values()]


def test_the_price_is_what_is_read_for_each_emitted_token(control: DraftPrefill) -> None:
    """Each row counts once with what was unread when it joined, whether it is read in one step or
    in several."""
    rows = [row(0, 300), row(1, 100), row(2, 500, "copy")]
    asked = [step(control, rows) for _ in range(3)]
    assert [[bool(count) for count in one] for one in asked] == [
        [False, False, True],
        [True, True, True],
        [True, True, True],
    ]
    step(control, rows, ends=40)
    assert prices(control) == [pytest.approx(400 / 80 * PACE_S, rel=0.05), 0]


def test_nothing_is_known_before_a_text_was_read_and_one_ended(control: DraftPrefill) -> None:
    assert prices(control) == [0, 0]
    step(control, [row(0, 300)])
    assert prices(control) == [0, 0]


def test_rows_that_are_never_drafted_for_do_not_count(control: DraftPrefill) -> None:
    off = row(0, 5000)
    rows = [row(1, 100)]
    off.draft_bound = 0
    off.draft_fixed = True
    step(control, [off, *rows])
    step(control, [off, *rows], ends=50)
    assert prices(control)[0] == pytest.approx(100 / 50 * PACE_S, rel=0.05)


def test_what_is_unread_is_known_in_seconds(control: DraftPrefill) -> None:
    step(control, [row(0, 300)])
    step(control, [row(0, 300)])
    auto = cast(AutoLength, control.control)
    auto.choose(cast(Any, Batch([row(1, 400), row(2, 900, "copy")])))
    assert [goodput.unread_s for goodput in auto.drafters.values()] == [
        pytest.approx(400 * PACE_S),
        0,
    ]
