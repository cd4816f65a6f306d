"""The speedup that costs and acceptance predict, for comparison with the clock: if the two agree, nothing is left unexplained.

    own seconds per token   = sum over steps of cost(width, depth, rows) / (sum over steps of (1 + K(depth)) - cut)
    plain seconds per token = mean over plain steps of cost(0, rows)
    speedup                 = plain seconds per token / own seconds per token

Costs are medians of whole steps of runs of their own, with the same drafter and verifier (`lab/costs.py`), in sweeps between the
runs that are predicted. A sweep draws plain steps and drafting ones in turn; each of its times is taken in units of its own plain
steps, so a slow minute divides out before sweeps are put together. A tree's step costs by its nodes and by its depth, each level
being one more pass of the draft: the same number of nodes makes deep trees where the draft is sure, and flat ones elsewhere. K(d)
are the draft tokens that drafts of depth d kept on average in this cell; where all drafts have one depth, the sum of the survival
curve. `cut` are tokens that ends of answers cut off. So of the runs only counts are taken, not a second of their time. With one
depth and one row this is `estimate/curves.py: predict`, whose costs it uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from outrider.lab.bench.notes import RunNote, depth_of
from outrider.lab.bench.result import Predicted
from outrider.lab.costs import SKIPPED, sweeping
from outrider.lab.disturbance import Disturbance
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.runner import Contender, Trace
from outrider.sampling.params import SamplingParams

PASSES = 6  # over all configurations: what disturbs one or two of them does not reach the median
REPEATS, LEAST_STEPS = 4, 16  # of each length, and of each pass
FURTHER_ATTEMPTS = 1
ENOUGH_STEPS = 1.3  # tokens per step up to which one run is enough
Times = dict[str, dict[str, float]]  # rows -> nodes of the widest row, "nodes/depth" of trees -> seconds, as JSON has it
PLAIN_KEY = "0"


@dataclass(frozen=True)
class Costs:
    """What steps of one configuration cost, by width and by rows."""

    by_rows: Mapping[int, StepCosts]  # by width, at depth 0 where `level_s` is more than 0
    level_s: Mapping[int, float]  # by rows: of each level of a tree, beside its nodes

    @classmethod
    def of(cls, times: Times) -> Costs | None:
        """None where nothing could be timed."""
        curves, levels = {}, {}
        for rows, found in sorted(times.items(), key=lambda item: int(item[0])):
            if found:
                points = {_width_depth(key): seconds for key, seconds in found.items()}
                levels[int(rows)] = level_s = _level_seconds(points)
                flat: dict[int, list[float]] = {}
                for (width, depth), seconds in points.items():
                    flat.setdefault(width, []).append(seconds - level_s * depth)
                curves[int(rows)] = StepCosts.of_steps({width: fmean(mine) for width, mine in flat.items()}, int(rows))
        return cls(curves, levels) if curves else None

    def seconds(self, width: int, rows: int, depth: int = 0) -> tuple[float, bool]:
        """Of one step, and whether it lies outside of what was timed. Between numbers of rows: straight lines."""
        known = list(self.by_rows)
        below = max((one for one in known if one <= rows), default=known[0])
        above = min((one for one in known if one >= rows), default=known[-1])
        (low, low_out), (high, high_out) = (self.by_rows[one].step_s(width) for one in (below, above))
        low, high = low + self.level_s[below] * depth, high + self.level_s[above] * depth
        share = (min(max(rows, below), above) - below) / (above - below) if above > below else 0.0
        return low + share * (high - low), low_out or high_out or not known[0] <= rows <= known[-1]


def time_steps(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, batch_size: int, max_other_cpu: float
) -> Times:
    """One sweep: costs of a configuration at these prompts, with the full batch and with one row; the first is its warm-up, too.
    Beside busy neighbours the calmest of a few attempts."""
    return {
        str(rows): _calmest(contender, prompts[:rows], params, rows, max_other_cpu)
        for rows in dict.fromkeys((batch_size, 1))
    }


def middle(several: Sequence[Times]) -> Times:
    """The median of several sweeps, for every number of rows and nodes that any of them timed; each sweep in units of its own
    plain steps, where it has any."""
    found: Times = {}
    for rows in dict.fromkeys(rows for times in several for rows in times):
        mine = _alike([times[rows] for times in several if rows in times])
        widths = sorted({width for times in mine for width in times}, key=_width_depth)
        found[rows] = {width: median(times[width] for times in mine if width in times) for width in widths}
    return found


def _alike(sweeps: list[dict[str, float]]) -> list[dict[str, float]]:
    """All of them as if their plain steps had taken the same time."""
    plain = [times[PLAIN_KEY] for times in sweeps if PLAIN_KEY in times]
    if not plain:
        return sweeps
    usual = median(plain)
    return [{key: s * usual / times.get(PLAIN_KEY, usual) for key, s in times.items()} for times in sweeps]


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
    """Of steps that draft nothing, from the configuration's own sweep: what slowed it slowed them too, and divides out. Plain
    decoding's own sweep stands in where it had none."""
    return Costs.of({rows: found for rows, found in times.items() if PLAIN_KEY in found}) or Costs.of(plain_times)


def _calmest(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, rows: int, max_other_cpu: float
) -> dict[str, float]:
    lengths = _lengths(contender, contender.built.options.num_draft_tokens)
    attempts: list[tuple[float, dict[str, float]]] = []
    while not attempts or (attempts[-1][0] > max_other_cpu and len(attempts) <= FURTHER_ATTEMPTS):
        others = Disturbance()
        times = _seconds_by_width(_sweep(contender, prompts, params, lengths), rows)
        attempts.append((others.share(), times))
    _, calmest = min(attempts, key=lambda attempt: attempt[0])
    return calmest


def _sweep(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, lengths: Sequence[int]
) -> list[Trace]:
    """About REPEATS steps of each length. How many tokens those bring is not known beforehand: the first run has as many tokens
    as steps are wanted, which is too few where drafts are kept; a second one then makes up for it."""
    order = _in_turn(lengths)
    wanted = SKIPPED + max(REPEATS * len(order), LEAST_STEPS)
    room = contender.built.context - max(map(len, prompts))

    def run(num_tokens: int) -> list[Trace]:
        tokens = max(min(num_tokens, room), 1)
        return contender.run(prompts, replace(params, max_tokens=tokens, ignore_eos=True, stop=[]), len(prompts))

    with sweeping(contender, order):
        traces = run(wanted)
        taken = [step.taken for trace in traces for step in trace.steps]
        tau = sum(taken) / len(taken)
        return traces if tau < ENOUGH_STEPS else [*traces, *run(math.ceil(wanted * tau))]


def _in_turn(lengths: Sequence[int]) -> list[int]:
    """A plain step between any two that draft: what everything is compared with."""
    return [length for most in lengths if most for length in (0, most)] or [0]


def _seconds_by_width(traces: Sequence[Trace], rows: int) -> dict[str, float]:
    """Nodes of the widest row (of a tree: and its depth) -> median seconds from step to step, as the runs are timed:
    `costs.step_seconds`, and the loop around steps. Steps with fewer rows do not count."""
    widest: dict[float, tuple[int, int]] = {}
    gaps: dict[float, float] = {}
    is_tree = any(step.parents is not None for trace in traces for step in trace.steps)
    for trace in traces:
        for before, step in pairwise(trace.steps[SKIPPED - 1 :]):
            if step.rows == rows:  # rows of one step have the same end
                shape = len(step.tokens), depth_of(step.parents, len(step.tokens))
                widest[step.at_s] = max(widest.get(step.at_s, (0, 0)), shape)
                gaps[step.at_s] = step.at_s - before.at_s
    by_shape: dict[tuple[int, int], list[float]] = {}
    for at, shape in widest.items():
        by_shape.setdefault(shape, []).append(gaps[at])
    return {
        f"{width}/{depth}" if is_tree and width else str(width): median(found)
        for (width, depth), found in sorted(by_shape.items())
    }


def _width_depth(key: str) -> tuple[int, int]:
    """Of a key of `Times`; a chain's depth is its width, and is not paid apart."""
    width, _, depth = key.partition("/")
    return int(width), int(depth or 0)


def _level_seconds(points: Mapping[tuple[int, int], float]) -> float:
    """Seconds that a level adds among trees of equally many nodes: least squares within widths; 0 where all are of one depth."""
    above = below = 0.0
    for width in {width for width, _ in points}:
        mine = [(depth, seconds) for (other, depth), seconds in points.items() if other == width]
        middle_depth, middle_s = fmean(depth for depth, _ in mine), fmean(seconds for _, seconds in mine)
        above += sum((depth - middle_depth) * (seconds - middle_s) for depth, seconds in mine)
        below += sum((depth - middle_depth) ** 2 for depth, _ in mine)
    return max(above / below, 0.0) if below else 0.0


def _lengths(contender: Contender, most: int | str | None) -> list[int]:
    """Draft lengths to time: around the fixed one, or over the range that `auto` may choose from."""
    if contender.configuration.is_plain:
        return [0]
    bound = int(str(most).rpartition(":")[2])
    if str(most).startswith("auto"):
        return sorted({0, 1, max(1, bound // 4), max(1, bound // 2), bound})
    return sorted({0, max(1, bound // 2), bound})
