"""Seconds: what a step took, how much of it was drafting, what wider passes take; so what a lost token and a draft token cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import isotonic_regression

from outrider.lab.costs import measure_passes
from outrider.lab.explain.explain_result import Times
from outrider.lab.recording import Step
from outrider.models.lm import LM

PASS_REPEATS = 5


def times_of(texts: Iterable[Sequence[Step]]) -> Times | None:
    """Means over the steps of all texts but their first ones, which also read the prompt into the draft; None where there is no
    other."""
    steps = [step for text in texts for step in text[1:]]
    seconds = sum(step.seconds / step.rows for step in steps)
    if seconds <= 0:
        return None
    draft_s, levels = sum(step.draft_s / step.rows for step in steps), sum(step.num_levels for step in steps)
    return Times(
        step_s=seconds / len(steps), draft_s=draft_s / len(steps), steps=len(steps),
        width=1 + sum(len(step.tokens) for step in steps) / len(steps), draft_level_s=draft_s / levels if levels else 0.0,
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
