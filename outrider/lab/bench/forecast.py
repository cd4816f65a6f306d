"""The speedup that costs and acceptance predict, for comparison with the clock: if the two agree, nothing is left unexplained.

    own seconds per token   = sum over steps of cost(width, rows) / (sum over steps of (1 + K(depth)) - cut)
    plain seconds per token = mean over plain steps of cost(0, rows)
    speedup                 = plain seconds per token / own seconds per token

Costs are medians of whole steps timed beforehand, on runs of their own, with the same drafter and verifier (`lab/costs.py`). K(d)
are the draft tokens that drafts of depth d kept on average in this cell; where all drafts have one depth, the sum of the survival
curve. `cut` are tokens that ends of answers cut off. So of the runs only counts are taken, not a second of their time. With one
depth and one row this is `estimate/curves.py: predict`, whose costs it uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from outrider.lab.bench.notes import RunNote
from outrider.lab.bench.result import Predicted
from outrider.lab.costs import SKIPPED, sweeping
from outrider.lab.disturbance import Disturbance
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.runner import Contender, Trace
from outrider.sampling.params import SamplingParams

PASSES = 3  # over all configurations: what disturbs one of them spoils a third of the times, and the median is another third's
REPEATS, LEAST_STEPS = 5, 16  # of each length, and of each pass
FURTHER_ATTEMPTS = 1
ENOUGH_STEPS = 1.3  # tokens per step up to which one run is enough
Times = dict[str, dict[str, float]]  # rows -> nodes of the widest row -> seconds, as JSON has it


@dataclass(frozen=True)
class Costs:
    """What steps of one configuration cost, by width and by rows."""

    by_rows: Mapping[int, StepCosts]

    @classmethod
    def of(cls, times: Times) -> Costs | None:
        """None where nothing could be timed."""
        curves = {
            int(rows): StepCosts.of_steps({int(nodes): s for nodes, s in found.items()}, int(rows))
            for rows, found in times.items()
            if found
        }
        return cls(dict(sorted(curves.items()))) if curves else None

    def seconds(self, width: int, rows: int) -> tuple[float, bool]:
        """Of one step, and whether it lies outside of what was timed. Between numbers of rows: straight lines."""
        known = list(self.by_rows)
        below = max((one for one in known if one <= rows), default=known[0])
        above = min((one for one in known if one >= rows), default=known[-1])
        (low, low_out), (high, high_out) = (self.by_rows[one].step_s(width) for one in (below, above))
        share = (min(max(rows, below), above) - below) / (above - below) if above > below else 0.0
        return low + share * (high - low), low_out or high_out or not known[0] <= rows <= known[-1]


def time_steps(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, batch_size: int, max_other_cpu: float
) -> Times:
    """Costs of a configuration at a cell's prompts, with the full batch and with one row; also its warm-up. Beside busy
    neighbours the calmest of a few attempts."""
    return {
        str(rows): _calmest(contender, prompts[:rows], params, rows, max_other_cpu)
        for rows in dict.fromkeys((batch_size, 1))
    }


def middle(several: Sequence[Times]) -> Times:
    """The median of several passes, for every number of rows and nodes that any of them timed."""
    found: Times = {}
    for rows in dict.fromkeys(rows for times in several for rows in times):
        mine = [times[rows] for times in several if rows in times]
        widths = sorted({width for times in mine for width in times}, key=int)
        found[rows] = {width: median(times[width] for times in mine if width in times) for width in widths}
    return found


def predicted(own: Sequence[RunNote], plain: Sequence[RunNote], times: Times, plain_times: Times) -> Predicted | None:
    """None where something was not timed, or nothing was decoded."""
    costs, plain_costs = Costs.of(times), _plain_costs(times, plain_times)
    if costs is None or plain_costs is None:
        return None
    steps = outside = tokens = 0
    seconds = 0.0
    for kind in (kind for note in own for kind in note.kinds):
        step_s, out = costs.seconds(kind.width, kind.rows)
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
    return Costs.of({rows: found for rows, found in times.items() if "0" in found}) or Costs.of(plain_times)


def _calmest(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, rows: int, max_other_cpu: float
) -> dict[str, float]:
    lengths = _lengths(contender, contender.built.options.num_draft_tokens)
    attempts: list[tuple[float, dict[int, float]]] = []
    while not attempts or (attempts[-1][0] > max_other_cpu and len(attempts) <= FURTHER_ATTEMPTS):
        others = Disturbance()
        times = _seconds_by_width(_sweep(contender, prompts, params, lengths), rows)
        attempts.append((others.share(), times))
    _, calmest = min(attempts, key=lambda attempt: attempt[0])
    return {str(nodes): seconds for nodes, seconds in calmest.items()}


def _sweep(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, lengths: Sequence[int]
) -> list[Trace]:
    """About REPEATS steps of each length. How many tokens those bring is not known beforehand: the first run has as many tokens
    as steps are wanted, which is too few where drafts are kept; a second one then makes up for it."""
    wanted = SKIPPED + max(REPEATS * len(lengths), LEAST_STEPS)
    room = contender.built.context - max(map(len, prompts))

    def run(num_tokens: int) -> list[Trace]:
        tokens = max(min(num_tokens, room), 1)
        return contender.run(prompts, replace(params, max_tokens=tokens, ignore_eos=True, stop=[]), len(prompts))

    with sweeping(contender, lengths):
        traces = run(wanted)
        taken = [step.taken for trace in traces for step in trace.steps]
        tau = sum(taken) / len(taken)
        return traces if tau < ENOUGH_STEPS else [*traces, *run(math.ceil(wanted * tau))]


def _seconds_by_width(traces: Sequence[Trace], rows: int) -> dict[int, float]:
    """Nodes of the widest row -> median seconds from step to step, as the runs are timed: `costs.step_seconds`, and the loop
    around steps. Steps with fewer rows do not count."""
    widest: dict[float, int] = {}
    gaps: dict[float, float] = {}
    for trace in traces:
        for before, step in pairwise(trace.steps[SKIPPED - 1 :]):
            if step.rows == rows:  # rows of one step have the same end
                widest[step.at_s] = max(widest.get(step.at_s, 0), len(step.tokens))
                gaps[step.at_s] = step.at_s - before.at_s
    by_width: dict[int, list[float]] = {}
    for at, width in widest.items():
        by_width.setdefault(width, []).append(gaps[at])
    return {width: median(found) for width, found in sorted(by_width.items())}


def _lengths(contender: Contender, most: int | str | None) -> list[int]:
    """Draft lengths to time: around the fixed one, or over the range that `auto` may choose from."""
    if contender.configuration.is_plain:
        return [0]
    bound = int(str(most).rpartition(":")[2])
    if str(most).startswith("auto"):
        return sorted({0, 1, max(1, bound // 4), max(1, bound // 2), bound})
    return sorted({0, max(1, bound // 2), bound})
