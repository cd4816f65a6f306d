"""What a step costs by number of rows and draft length, measured before the first request: so that a load-aware control knows
from its first step what a crowd costs, and need not find out at its expense. What was measured is kept for the next start
(`step_costs.py`): the second one takes no time.

For other numbers of rows the control begins with the nearest one's (`Goodput`), and real steps correct it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low
from typing import Any

from outrider.admission import new_row
from outrider.build import Built
from outrider.decode import Decoder
from outrider.draft_length import AutoLength, Goodput
from outrider.engine.batch import Batch
from outrider.engine.drafter_pool import DrafterPool
from outrider.engine.step_costs import StepCosts, facts_of
from outrider.models.probe import probe_tokens
from outrider.parts import Parts
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft, Verdict

BUDGET_S = 8.0  # after that, what is known must do
BUDGET_ALONE_S = 2.0  # the same where there is no server that starts, only a user who waits
WARM_UP, REPEATS, REPEATS_ALONE = 2, 4, 30  # steps per number of rows; per size, in a crowd and of one row
REPEATS_ON_CUDA = 12  # of one row: where its text outgrows a recording, steps are recorded anew and say little
RECORDED = 2  # steps more of every size on CUDA: the first runs as it is, the second is recorded (`models/graphs.py`)
LEAST_SIZES, LEAST_TIMES = 3, 2  # how many sizes are timed, and how often, whatever it takes: what was timed once may be anything
ONE_ROW = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 16, 23, 31, 32, 47, 63)  # sizes timed alone; a pass over 8, 16, ... is a node less
PATTERN, TIMES = 24, 4  # a prompt that repeats itself: look-up drafters offer something, too

Say = Callable[[str], None]


def calibrate(batch: Batch, drafter_pool: DrafterPool, most_rows: int, status: Say = lambda line: None) -> None:
    """Tell the batch's controls what steps cost, where they want to know. Leaves the batch as new."""
    inner, began = batch.control.inner, time.perf_counter()
    if not isinstance(inner, AutoLength):
        return
    for name, parts in drafter_pool.parts.items():
        facts = facts_of(batch.built.options, batch.built.target, batch.built.draft, parts)
        costs = StepCosts.of(facts, keeps=parts.drafter.keeps_costs)
        missing = [count for count in _counts(most_rows) if count not in costs.seconds]
        for count in missing:
            left = BUDGET_S - (time.perf_counter() - began)
            if left < 0:
                break
            status(f"timing steps: {name}, {count} at once")
            drafter_pool.choose(batch.decoder.drafter, name)
            costs.add(count, _times(batch.decoder, batch.built, name, count, _sizes(inner.drafters[name], count), left))
        for count, seconds in costs.seconds.items():
            inner.drafters[name].learn_costs(count, seconds)
    batch.reset()  # what drafters learned from these texts is no user's


def calibrate_alone(built: Built, decoder: Decoder, parts: Parts, status: Say = lambda line: None) -> None:
    """Times the steps of a decoder without a server, for one row. `built`: what rows are made from; `decoder`: of `parts`,
    idle."""
    control = decoder.control
    if not isinstance(control, AutoLength):
        return
    (goodput,) = control.drafters.values()
    costs = StepCosts.of(facts_of(built.options, built.target, built.draft, parts), keeps=parts.drafter.keeps_costs)
    if 1 not in costs.seconds:
        status("timing steps of every draft length, once per model and machine")
        drafter = decoder.drafter
        if drafter.learns:  # what it learned from this text is no user's
            drafter = parts.make_drafter(built.target, built.draft if parts.wants_draft else None)
        trial = Decoder(decoder.target, drafter, decoder.verifier, control)
        costs.add(1, _times(trial, built, None, 1, _sizes(goodput, 1), BUDGET_ALONE_S))
    goodput.learn_costs(1, costs.seconds.get(1, {}))


def _counts(most: int) -> list[int]:
    """The ends first: what lies between can be guessed."""
    middle = [count for count in (8, 2, 16, 4, 32, 64, 128) if 1 < count < most]
    return [1, most, *middle] if most > 1 else [1]


def _sizes(goodput: Goodput, count: int) -> list[int]:
    """Alone all that may be asked for, in a crowd a few; the most telling ones first."""
    most = goodput.max_nodes
    few = [most, *(size for size in (0, 2, (most + 1) // 2, 1, 3) if size < most)]
    wanted = few if count > 1 else [*few, *(size for size in ONE_ROW if size < most)]
    return list(dict.fromkeys(wanted))


def _times(
    decoder: Decoder, built: Built, drafter: str | None, count: int, sizes: list[int], budget_s: float
) -> dict[int, float]:
    """Median seconds of a step by the number of nodes in the widest row.

    The step has `count` rows that `drafter` drafts for; empty where the context is too short for any.
    """
    control, began = decoder.control, time.perf_counter()
    pattern = probe_tokens(built.target.lm.shape.vocab_size, PATTERN, "cpu")[0].tolist()
    prompt = (pattern * TIMES)[: max(1, built.context // 2)]
    on_cuda = decoder.target.device.type == "cuda"
    warm_up = WARM_UP + (RECORDED * len(sizes) if on_cuda else 0)
    repeats = REPEATS if count > 1 else REPEATS_ON_CUDA if on_cuda else REPEATS_ALONE
    timer = decoder.control = _Timer(sizes, warm_up)
    params = SamplingParams(max_tokens=built.context, ignore_eos=True)
    late = warm_up + LEAST_SIZES * LEAST_TIMES  # steps that may still follow when the time is over
    try:
        for number in range(count):
            decoder.add(replace(new_row(built, number, prompt, params, with_text=False), drafter=drafter))
        for _ in range(warm_up + repeats * len(sizes)):
            if any(row.finish_reason for row in decoder.rows):  # a very short context
                break
            if time.perf_counter() - began > budget_s:
                timer.only(sizes[:LEAST_SIZES])
                if len(timer.known()) >= LEAST_SIZES or not late:
                    break
                late -= 1
            decoder.step()
    finally:
        decoder.control = control
        for index in reversed(range(len(decoder.rows))):
            decoder.remove(index)
    return timer.known()


class _Timer:
    """A `Control` that goes round the sizes."""

    def __init__(self, sizes: list[int], skip: int) -> None:
        """`skip`: steps at the beginning that are not timed."""
        self._sizes, self._turn = sizes, 0
        self._skip = skip
        self._size = 0
        self.seconds: dict[int, list[float]] = {}

    def only(self, sizes: list[int]) -> None:
        """Go round these from now on."""
        self._sizes = sizes

    def known(self) -> dict[int, float]:
        """Median seconds of the sizes that were timed often enough; of two the lower one, for a step is only ever disturbed."""
        often = {size: seconds for size, seconds in sorted(self.seconds.items()) if len(seconds) >= LEAST_TIMES}
        return {size: median_low(seconds) for size, seconds in often.items()}

    def choose(self, rows: Rows) -> list[int]:
        self._size = self._sizes[self._turn % len(self._sizes)]
        self._turn += 1
        return [row.wish(self._size) for row in rows]

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict, seconds: float) -> None:
        drafted = max(draft.lists[1])
        self._skip -= 1
        if self._skip < 0 and bool(drafted) == bool(self._size):  # a step that asked in vain is no plain one
            self.seconds.setdefault(drafted, []).append(seconds)

    def summary(self) -> dict[str, Any]:
        return {}
