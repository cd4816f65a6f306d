"""One short run of a family, sweeping over draft sizes: what its steps cost and how many tokens
they keep.

Where drafts are nested, a step that was asked for k nodes tells about every smaller size too
(docs/tune.md, "Forecast"); a drafter that offers fewer than asked fails there, as it would in
earnest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from outrider.lab.result import Record
from outrider.lab.runner import Contender
from outrider.lab.tune.space import Family
from outrider.sampling.params import SamplingParams

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


@dataclass(frozen=True)
class Sample:
    """A prompt of a probe or of the confirmation."""

    id: str
    task: str
    tokens: list[int]
    params: SamplingParams


def run_probe(
    contender: Contender,
    family: Family,
    samples: Sequence[Sample],
    batch_size: int = 1,
    is_enough: Callable[[Probe], bool] = lambda probe: False,
) -> Probe:
    """Decode the samples, sizes 0 and `family.sizes` in turn.

    `is_enough` is asked after every round of one sample of each task (where rows are decoded alone:
    a smaller batch would cost otherwise); if so, that was all.
    """
    rounds = rounds_of(samples) if batch_size == 1 else [list(samples)]
    probe = Probe(family=family.label, steps={}, num_prompts=0, tokens=0, seconds=0.0)
    # continues from run to run: texts do not all begin with the same sizes
    with contender.sweeping(sweep_order(family)):
        for several in rounds:
            _run(contender, probe, several, batch_size)
            if is_enough(probe):
                break
    return probe


def _run(contender: Contender, probe: Probe, samples: Sequence[Sample], batch_size: int) -> None:
    """Decode some samples, and add what they show to the probe."""
    traces = contender.run(
        [sample.tokens for sample in samples], [sample.params for sample in samples], batch_size
    )
    for trace, sample in zip(traces, samples, strict=True):
        probe.steps.setdefault(sample.task, []).extend(
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
    probe.num_prompts += len(samples)
    probe.seconds += max(trace.steps[-1].at_s for trace in traces) - traces[0].began_s


def rounds_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The first sample of every task, then the second one of every task that has two, and so on."""
    rounds: list[list[Sample]] = []
    seen: dict[str, int] = {}
    for sample in samples:
        number = seen.get(sample.task, 0)
        seen[sample.task] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(sample)
    return rounds


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
