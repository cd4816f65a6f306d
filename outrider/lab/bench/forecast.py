"""The speedup that costs and acceptance predict, for comparison with the clock: if the two agree, nothing is left unexplained.

    own seconds per token   = sum over steps of cost(width, depth, rows) / (sum over steps of (1 + K(depth)) - cut)
    plain seconds per token = mean over plain steps of cost(0, rows)
    speedup                 = plain seconds per token / own seconds per token

    cost(w, d, rows) = pass(w + 1) + fixed + w per_token + d per_level       cost(0, rows): plain steps, as timed

Costs come from sweeps (`sweeps.py`), runs of their own between those that are predicted. A tree's step costs by its nodes and
by its depth, each level being one more pass of the draft: the same number of nodes makes deep trees where the draft is sure, and
flat ones elsewhere. K(d) are the draft tokens that drafts of depth d kept on average in this cell; where all drafts have one
depth, the sum of the survival curve. `cut` are tokens that ends of answers cut off. So of the runs only counts are taken, not a
second of their time. With one depth and one row this is `estimate/curves.py: predict`, whose costs it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from outrider.lab.bench.bench_result import Predicted
from outrider.lab.bench.notes import RunNote
from outrider.lab.bench.sweeps import PLAIN_KEY, Times, Timings, width_depth
from outrider.lab.estimate.curves import CostPoints, StepCosts


@dataclass(frozen=True)
class Costs:
    """What steps of one configuration cost, by width and by rows."""

    by_rows: Mapping[int, StepCosts]  # by width, at depth 0
    level_s: Mapping[int, float]  # by rows: of each level of a tree, beside its nodes

    @classmethod
    def of(cls, times: Times) -> Costs | None:
        """None where nothing could be timed."""
        fitted = {rows: _fitted(one, rows) for rows, one in sorted(times.items()) if one.steps and one.passes}
        if not fitted:
            return None
        return cls({rows: costs for rows, (costs, _) in fitted.items()}, {rows: s for rows, (_, s) in fitted.items()})

    def seconds(self, width: int, rows: int, depth: int = 0) -> tuple[float, bool]:
        """Seconds of one step, and whether it lies outside of what was timed. Between numbers of rows: straight lines."""
        known = list(self.by_rows)
        below = max((one for one in known if one <= rows), default=known[0])
        above = min((one for one in known if one >= rows), default=known[-1])
        (low, low_out), (high, high_out) = (self.by_rows[one].step_s(width) for one in (below, above))
        low, high = low + self.level_s[below] * depth, high + self.level_s[above] * depth
        share = (min(max(rows, below), above) - below) / (above - below) if above > below else 0.0
        return low + share * (high - low), low_out or high_out or not known[0] <= rows <= known[-1]


def predicted(own: Sequence[RunNote], plain: Sequence[RunNote], times: Times, plain_times: Times) -> Predicted | None:
    """None where something was not timed, or nothing was decoded."""
    costs, plain_costs = Costs.of(times), _plain_costs(times, plain_times)
    if costs is None or plain_costs is None:
        return None
    steps = outside = tokens = 0
    seconds = 0.0
    for kind in (kind for note in own for kind in note.kinds):
        step_s, out = costs.seconds(kind.width, kind.rows, kind.depth)
        steps, seconds, outside = steps + kind.count, seconds + kind.count * step_s, outside + kind.count * out
        tokens += kind.count + kind.kept  # count (1 + K), summed over the depths
    tokens -= sum(note.cut for note in own)
    plain_steps = [(plain_costs.seconds(0, kind.rows)[0], kind.count) for note in plain for kind in note.kinds]
    num_plain = sum(count for _, count in plain_steps)
    if not (steps and num_plain and tokens > 0):
        return None
    plain_step_s = sum(step_s * count for step_s, count in plain_steps) / num_plain
    return Predicted(
        speedup=plain_step_s * tokens / seconds, tau=tokens / steps, step_s=seconds / steps, plain_step_s=plain_step_s,
        extrapolated_share=outside / steps,
    )  # fmt: skip


def _plain_costs(times: Times, plain_times: Times) -> Costs | None:
    """Costs of steps that draft nothing, from the configuration's own sweep: what slowed it slowed them too, and divides
    out. Plain decoding's own sweep stands in where it had none."""
    return Costs.of({rows: found for rows, found in times.items() if PLAIN_KEY in found.steps}) or Costs.of(plain_times)


def _fitted(timings: Timings, rows: int) -> tuple[StepCosts, float]:
    """Costs of a step, and of a tree's level: passes as timed, and what the drafting steps took beyond their pass as a line in
    nodes and levels, none of it negative, each shape weighing by how often it was timed."""
    plain_s = timings.steps[PLAIN_KEY][0] if PLAIN_KEY in timings.steps else None
    passes = _passes(timings.passes, plain_s)
    points = [(*width_depth(shape), *timed) for shape, timed in timings.steps.items() if shape != PLAIN_KEY]
    plain_overhead = 0.0 if plain_s is None else max(plain_s - passes.seconds(1)[0], 0.0)
    if not points:  # it never offered anything
        return StepCosts(target=passes, draft_fixed_s=plain_overhead, plain_overhead_s=plain_overhead, num_rows=rows), 0.0
    weight = np.sqrt([count for *_, count in points])
    terms = np.array([(1.0, width, depth) for width, depth, *_ in points]) * weight[:, None]
    beyond = np.array([seconds - passes.seconds(width + 1)[0] for width, _, seconds, _ in points]) * weight
    (fixed, per_token, per_level), _ = nnls(terms, beyond)
    costs = StepCosts(
        target=passes, draft_fixed_s=fixed, draft_s_per_token=per_token, plain_overhead_s=plain_overhead, num_rows=rows
    )
    return costs, float(per_level)


def _passes(seconds: Mapping[int, float], plain_s: float | None) -> CostPoints:
    """A plain step holds a pass over one token, so that is no longer than the step: alone it may have met a slower moment."""
    first = seconds[min(seconds)]
    factor = 1.0 if plain_s is None else min(1.0, plain_s / first)
    return CostPoints.of({width: factor * time for width, time in seconds.items()})
