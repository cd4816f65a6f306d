"""One short run of a family, sweeping over draft sizes: what its steps cost and how many tokens
they keep.

Where drafts are nested, a step that was asked for k nodes tells about every smaller size too
(docs/tune.md, "Forecast"); a drafter that offers fewer than asked fails there, as it would in
earnest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from operator import mul

from outrider.lab.result import Record
from outrider.lab.runner import Contender
from outrider.lab.tune.space import Family, TuneRequest
from outrider.lab.workload.prompts import PreparedPrompt

SKIPPED = 2  # first steps of a run, which touch new memory
# of a depth never reached: it accepts like the one before it, this many tries' worth
PRIOR_TRIES = 0.5


class StepNote(Record):
    """The record of one step of one row in a probe."""

    asked: int
    drafted: int
    kept: int  # draft tokens
    seconds: float
    steady: bool  # not one of a run's first steps


class Probe(Record):
    """Notes of one family, by task."""

    family: str
    steps: dict[str, list[StepNote]]
    num_prompts: int
    tokens: int  # output tokens of the run
    seconds: float  # of the whole run, prompts included


def run_probe(
    contender: Contender,
    family: Family,
    prompts: Sequence[PreparedPrompt],
    request: TuneRequest,
    is_enough: Callable[[Probe], bool] = lambda probe: False,
) -> Probe:
    """Decode the prompts, sizes 0 and `family.sizes` in turn.

    `is_enough` is asked after every round of one prompt of each task (where rows are decoded alone:
    a smaller batch would cost otherwise); if so, that was all.
    """
    rounds = rounds_of(prompts) if request.batch_size == 1 else [list(prompts)]
    probe = Probe(family=family.label, steps={}, num_prompts=0, tokens=0, seconds=0.0)
    # continues from run to run: texts do not all begin with the same sizes
    with contender.sweeping(sweep_order(family)):
        for several in rounds:
            _run(contender, probe, several, request)
            if is_enough(probe):
                break
    return probe


def _run(
    contender: Contender, probe: Probe, prompts: Sequence[PreparedPrompt], request: TuneRequest
) -> None:
    """Decode some prompts, and add what they show to the probe."""
    params = [request.params(prompt) for prompt in prompts]
    traces = contender.run([prompt.tokens for prompt in prompts], params, request.batch_size)
    for trace, prompt in zip(traces, prompts, strict=True):
        probe.steps.setdefault(prompt.request.task, []).extend(
            StepNote(
                asked=step.asked,
                drafted=len(step.tokens),
                kept=len(step.path),
                seconds=step.seconds,
                steady=number >= SKIPPED,
            )
            for number, step in enumerate(trace.steps)
        )
        probe.tokens += len(trace.completion.token_ids)
    probe.num_prompts += len(prompts)
    probe.seconds += max(trace.steps[-1].at_s for trace in traces) - traces[0].began_s


def rounds_of(prompts: Sequence[PreparedPrompt]) -> list[list[PreparedPrompt]]:
    """The first prompt of every task, then the second one of every task that has two, and so on."""
    by_task: dict[str, list[PreparedPrompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.request.task, []).append(prompt)
    rounds = zip_longest(*by_task.values())
    return [[prompt for prompt in several if prompt is not None] for several in rounds]


def sweep_order(family: Family) -> list[int]:
    """Every size once, plain steps twice; where drafts are nested the longest goes between the
    others, for it teaches most."""
    longest = family.sizes[-1]
    if not family.nested:
        return [0, *family.sizes]
    between = [size for shorter in family.sizes[:-1] for size in (shorter, longest)]
    return [0, *between, 0, longest]


def conditional_acceptance(steps: Sequence[StepNote], length: int) -> list[float]:
    """P(i-th token kept | i - 1 kept, i asked for), i = 1..length."""
    curve = []
    before = 0.5
    for depth in range(1, length + 1):
        tried = [step for step in steps if step.asked >= depth and step.kept >= depth - 1]
        kept = sum(step.kept >= depth for step in tried)
        before = (kept + PRIOR_TRIES * before) / (len(tried) + PRIOR_TRIES)
        curve.append(before)
    return curve


def survival(steps: Sequence[StepNote], length: int) -> list[float]:
    """S(1) .. S(length) of nested drafts."""
    return list(accumulate(conditional_acceptance(steps, length), mul))


def mean_kept(steps: Sequence[StepNote], size: int, *, nested: bool) -> float | None:
    """Draft tokens kept by a step that asks for `size` nodes; None where none was ever asked for
    this many."""
    if nested:
        return sum(survival(steps, size)) if any(step.asked for step in steps) else None
    kept = [step.kept for step in steps if step.asked == size]
    return sum(kept) / len(kept) if kept else None


def offered_widths(steps: Sequence[StepNote], size: int, *, nested: bool) -> list[int]:
    """Nodes drafted by steps that ask for `size`."""
    if nested:
        return [min(step.drafted, size) for step in steps if step.asked >= size]
    return [step.drafted for step in steps if step.asked == size]
