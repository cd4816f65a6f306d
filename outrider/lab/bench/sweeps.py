"""What the steps of a configuration cost in a cell: sweeps between the runs that are to be predicted.

A sweep takes a few plain steps and a few drafting ones in turn, with the same drafter and verifier, on prompts of the cell
(`lab/costs.py`); passes of the target alone over 1, 2, ... tokens follow at once. The first step behind a change of length does
not count: it pays for the change (other buffers, a draft that must catch up), which the runs to be predicted do not. Each sweep
is taken in units of its own plain steps, so a slow minute divides out before the steps of all sweeps are put together.

Why passes, too: what a draft of some width adds to a pass is nearly a straight line, a pass is not (on CPUs a ninth token costs a
third more). And a look-up offers its longest drafts seldom, perhaps never before the run that is to be predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any

from outrider.lab.bench.notes import depth_of
from outrider.lab.costs import SKIPPED, measure_passes, sweeping
from outrider.lab.disturbance import Disturbance, Repeats
from outrider.lab.runner import Contender, Trace
from outrider.sampling.params import SamplingParams

PASSES = 6  # sweeps over all configurations: what disturbs one or two of them does not reach the median
HELD = 3  # steps of one length on end
ROUNDS, LEAST_STEPS = 2, 16  # over all lengths, and of each sweep
PASS_REPEATS = 2  # of each target pass in a sweep
FURTHER_ATTEMPTS = 1
ENOUGH_STEPS = 1.3  # tokens per step up to which one run is enough
EVERY_WIDTH, WIDE_STRIDE = 9, 4  # query tokens up to which each number is timed, and the stride behind
Sweep = dict[str, dict[str, Any]]  # rows -> {"steps": {shape: seconds of each}, "passes": {query tokens: seconds}}, for JSON
PLAIN_KEY = "0"


@dataclass(frozen=True)
class Timings:
    """All sweeps of a configuration together, for one number of rows."""

    steps: Mapping[str, tuple[float, int]]  # nodes of the widest row, "nodes/depth" of trees -> median seconds, how many
    passes: Mapping[int, float] = field(default_factory=dict)  # query tokens per row -> median seconds


Times = Mapping[int, Timings]  # by rows


def time_steps(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, batch_size: int, repeats: Repeats
) -> Sweep:
    """One sweep: costs of a configuration at these prompts, with the full batch and with one row; the first is its warm-up, too.
    Beside busy neighbours the calmest of a few attempts."""
    found: Sweep = {}
    for rows in dict.fromkeys((batch_size, 1)):
        attempt = partial(_timed, contender, prompts[:rows], params, rows)
        (_, found[str(rows)]), _ = repeats.calmest(attempt, itemgetter(0), FURTHER_ATTEMPTS)
    return found


def together(sweeps: Sequence[Sweep]) -> Times:
    """For every number of rows and shape that any sweep timed; each sweep in units of its own plain steps, if it has any."""
    found: dict[int, Timings] = {}
    for rows in dict.fromkeys(rows for sweep in sweeps for rows in sweep):
        alike = _alike([sweep[rows] for sweep in sweeps if rows in sweep])
        steps: dict[str, list[float]] = {}
        passes: dict[int, list[float]] = {}
        for one in alike:
            for shape, seconds in one["steps"].items():
                steps.setdefault(shape, []).extend(seconds)
            for width, time in one["passes"].items():
                passes.setdefault(int(width), []).append(time)
        found[int(rows)] = Timings(
            {shape: (median(steps[shape]), len(steps[shape])) for shape in sorted(steps, key=width_depth)},
            {width: median(passes[width]) for width in sorted(passes)},
        )
    return found


def width_depth(shape: str) -> tuple[int, int]:
    """Width and depth of a key of `Timings.steps`; a chain's depth is its width, and is not paid apart."""
    width, _, depth = shape.partition("/")
    return int(width), int(depth or 0)


def _alike(sweeps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them as if their plain steps had taken the same time."""
    plain = [median(one["steps"][PLAIN_KEY]) for one in sweeps if PLAIN_KEY in one["steps"]]
    if not plain:
        return sweeps
    usual = median(plain)
    return [_scaled(one, usual / median(one["steps"].get(PLAIN_KEY, [usual]))) for one in sweeps]


def _scaled(sweep: dict[str, Any], factor: float) -> dict[str, Any]:
    steps = {shape: [factor * time for time in seconds] for shape, seconds in sweep["steps"].items()}
    return {"steps": steps, "passes": {width: factor * time for width, time in sweep["passes"].items()}}


def _timed(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, rows: int
) -> tuple[float, dict[str, Any]]:
    """One attempt: the share of the processors that others used, and the times."""
    length = contender.built.options.num_draft_tokens
    others = Disturbance()
    steps = _seconds_by_shape(*_steps(contender, prompts, params, _lengths(contender, length)), rows)
    passes = measure_passes(
        contender.built.target.lm, _widths(contender, length), rows=rows, context=max(map(len, prompts)), repeats=PASS_REPEATS
    )
    return others.share(), {"steps": steps, "passes": {str(width): s for width, s in passes.items()}}


def _steps(
    contender: Contender, prompts: Sequence[list[int]], params: SamplingParams, lengths: Sequence[int]
) -> tuple[list[Trace], list[int]]:
    """ROUNDS over all lengths, and what each step was asked for. How many tokens those bring is not known beforehand: the first
    run has as many tokens as steps are wanted, which is too few where drafts are kept; a second one then makes up for it."""
    order = _in_turn(lengths)
    wanted = SKIPPED + max(ROUNDS * len(order), LEAST_STEPS)
    room = contender.built.context - max(map(len, prompts))

    def run(num_tokens: int) -> list[Trace]:
        tokens = max(min(num_tokens, room), 1)
        return contender.run(prompts, replace(params, max_tokens=tokens, ignore_eos=True, stop=[]), len(prompts))

    with sweeping(contender, order) as sweep:
        traces = run(wanted)
        taken = [step.taken for trace in traces for step in trace.steps]
        tau = sum(taken) / len(taken)
        if tau >= ENOUGH_STEPS:
            traces += run(math.ceil(wanted * tau))
        return traces, sweep.asked


def _in_turn(lengths: Sequence[int]) -> list[int]:
    """Plain steps between any two lengths that draft: what everything is compared with."""
    return [tokens for length in lengths if length for tokens in (0, length) for _ in range(HELD)] or [0]


def _seconds_by_shape(traces: Sequence[Trace], asked: Sequence[int], rows: int) -> dict[str, list[float]]:
    """Nodes of the widest row (of a tree: and its depth) -> seconds from step to step, the loop around steps included, as the
    runs are timed. Steps with fewer rows do not count, nor those behind another length.
    `asked`: for, by all steps in the order of the clock."""
    clock = sorted({step.at_s for trace in traces for step in trace.steps})  # rows of one step have the same end
    held = {at for at, now, before in zip(clock[1:], asked[1:], asked, strict=False) if now == before}
    widest: dict[float, tuple[int, int]] = {}
    gaps: dict[float, float] = {}
    is_tree = any(step.parents is not None for trace in traces for step in trace.steps)
    for trace in traces:
        for before, step in pairwise(trace.steps[SKIPPED - 1 :]):
            if step.rows == rows and step.at_s in held:
                shape = len(step.tokens), depth_of(step.parents, len(step.tokens))
                widest[step.at_s] = max(widest.get(step.at_s, (0, 0)), shape)
                gaps[step.at_s] = step.at_s - before.at_s
    found: dict[str, list[float]] = {}
    for at, (width, depth) in sorted(widest.items(), key=lambda item: item[1]):
        found.setdefault(f"{width}/{depth}" if is_tree and width else str(width), []).append(gaps[at])
    return found


def _lengths(contender: Contender, length: int | str | None) -> list[int]:
    """Draft lengths to time: around the fixed one, or over the range that `auto` may choose from."""
    if contender.configuration.is_plain:
        return [0]
    bound = int(str(length).rpartition(":")[2])
    if str(length).startswith("auto"):
        return sorted({0, 1, max(1, bound // 4), max(1, bound // 2), bound})
    return sorted({0, max(1, bound // 2), bound})


def _widths(contender: Contender, length: int | str | None) -> list[int]:
    """Query tokens of the passes to time: all that may come up while there are few, some of the others."""
    bound = max(_lengths(contender, length)) + 1
    return sorted({*range(1, min(bound, EVERY_WIDTH) + 1), *range(EVERY_WIDTH, bound, WIDE_STRIDE), bound})
