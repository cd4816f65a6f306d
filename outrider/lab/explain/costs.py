"""Seconds: what a step took, how much of it was drafting, what wider passes take; so what a lost token and a draft token cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from outrider.lab.costs import measure_passes
from outrider.lab.explain.explain_result import Times
from outrider.lab.recording import Step
from outrider.models.lm import LM

PASS_REPEATS = 5


@dataclass
class Clock:
    """Sums over steps."""

    seconds: float = 0.0
    draft_s: float = 0.0
    drafted: int = 0
    levels: int = 0
    steps: int = 0

    def add(self, steps: Sequence[Step]) -> None:
        """One text. Its first step also reads the prompt into the draft, so it says nothing about the others."""
        for step in steps[1:]:
            self.seconds += step.seconds / step.rows
            self.draft_s += step.draft_s / step.rows
            self.drafted += len(step.tokens)
            self.levels += num_levels(step)
            self.steps += 1

    def times(self) -> Times | None:
        """None where no text had a second step."""
        if not self.steps or self.seconds <= 0:
            return None
        return Times(
            step_s=self.seconds / self.steps, draft_s=self.draft_s / self.steps, steps=self.steps,
            width=1 + self.drafted / self.steps, draft_level_s=self.draft_s / self.levels if self.levels else 0.0,
        )  # fmt: skip


def with_passes(times: Times, target: LM, longest: int, context: int) -> Times:
    """Also what target passes over 1 .. longest + 1 tokens take, measured now, one width after the other, several times: medians,
    made to rise with the width (isotonic regression), as passes do. The target must be idle."""
    widths = range(1, longest + 2)
    room = max(1, min(context, target.shape.context_length - longest - 2))
    found = measure_passes(target, widths, context=room, repeats=PASS_REPEATS)
    risen = isotonic_regression([found[width] for width in widths]).x.tolist()
    return times.model_copy(update={"pass_s": dict(zip(widths, risen, strict=True))})


def rest_at(times: Times, width: float) -> float:
    """Seconds of a step without drafting, were its target pass `width` tokens wide: in proportion to passes of both widths, so
    that a machine which was faster or slower when these were measured does not matter."""
    if not times.pass_s:
        return times.rest_s
    now, then = np.interp([times.width, width], list(times.pass_s), list(times.pass_s.values()))
    return times.rest_s * float(then / now)


def chain_rate(times: Times | None, tokens_per_step: float, length: int) -> float | None:
    """Tokens/s of steps that draft a chain of `length`: drafting is paid by the level, a pass by its width."""
    if times is None or (length and not times.draft_level_s):
        return None
    return tokens_per_step / (rest_at(times, length + 1) + length * times.draft_level_s)


def num_levels(step: Step) -> int:
    """The levels of a step's draft: a chain's tokens, a tree's depth."""
    levels = [0]
    for parent in step.parents if step.parents is not None else range(-1, len(step.tokens) - 1):
        levels.append(levels[parent + 1] + 1)
    return max(levels)
