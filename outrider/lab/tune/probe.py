"""One short run of a family, sweeping over draft sizes: what its steps cost and how many tokens they keep.

Where drafts are nested, a step that was asked for k nodes tells about every smaller size too (docs/tune.md, "Forecast"); a
drafter that offers fewer than asked fails there, as it would in earnest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import Field

from outrider.lab.costs import SKIPPED, sweeping
from outrider.lab.result import Record
from outrider.lab.runner import Contender, Trace
from outrider.lab.tune.space import Family
from outrider.sampling.params import SamplingParams

PRIOR_TRIES = 0.5  # of a depth never reached: it accepts like the one before it, this many tries' worth


class StepNote(Record):
    """What a probe keeps of one step of one row."""

    asked: int
    drafted: int
    kept: int  # draft tokens
    seconds: float
    steady: bool  # not one of a run's first steps
    draft_s: float = 0.0  # of `seconds`, those in the drafter


class Probe(Record):
    """Notes of one family, by task."""

    family: str
    steps: dict[str, list[StepNote]]
    tokens: int  # output tokens of the run
    seconds: float  # of the whole run, prompts included
    answers: list[list[int]] = Field(default_factory=list)  # token ids, in the order of the samples


@dataclass(frozen=True)
class Sample:
    """A prompt of a probe or of the confirmation."""

    id: str
    task: str
    tokens: list[int]
    params: SamplingParams


def run_probe(
    contender: Contender, family: Family, samples: Sequence[Sample], batch_size: int = 1,
    is_enough: Callable[[Probe], bool] | None = None,
) -> Probe:  # fmt: skip
    """Decode the samples, sizes 0 and `family.sizes` in turn. `is_enough` is asked after every round of one sample of each task
    (where rows are decoded alone: a smaller batch would cost otherwise); if so, that was all."""
    with sweeping(contender, sweep_order(family)):  # goes on from run to run, so short texts do not all begin with the same sizes
        if is_enough is None or batch_size > 1:
            return _run(contender, family, samples, batch_size)
        first, *others = rounds_of(samples)
        probe = _run(contender, family, first, batch_size)
        for more in others:
            if is_enough(probe):
                break
            probe = joined(probe, _run(contender, family, more, batch_size))
        return probe


def _run(contender: Contender, family: Family, samples: Sequence[Sample], batch_size: int) -> Probe:
    traces = contender.run([one.tokens for one in samples], [one.params for one in samples], batch_size)
    ends = [trace.steps[-1].at_s for trace in traces]
    return Probe(
        family=family.label, steps=_notes(traces, samples), tokens=sum(len(trace.completion.token_ids) for trace in traces),
        seconds=max(ends) - traces[0].began_s, answers=[trace.completion.token_ids for trace in traces],
    )  # fmt: skip


def joined(first: Probe, second: Probe) -> Probe:
    """Two probes of one family as one: the samples of the second behind those of the first."""
    tasks = dict.fromkeys([*first.steps, *second.steps])
    return Probe(
        family=first.family, steps={task: [*first.steps.get(task, []), *second.steps.get(task, [])] for task in tasks},
        tokens=first.tokens + second.tokens, seconds=first.seconds + second.seconds, answers=[*first.answers, *second.answers],
    )  # fmt: skip


def rounds_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The first sample of every task, then the second one of every task that has two, and so on."""
    rounds: list[list[Sample]] = []
    seen: dict[str, int] = {}
    for sample in samples:
        number = seen[sample.task] = seen.get(sample.task, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(sample)
    return rounds


def sweep_order(family: Family) -> list[int]:
    """Every size once, plain steps twice; where drafts are nested the longest goes between the others, for it teaches most."""
    longest, shorter = family.sizes[-1], family.sizes[:-1]
    if not family.nested:
        return [0, *family.sizes]
    return [0, *(size for one in shorter for size in (one, longest)), 0, longest]


def _notes(traces: Sequence[Trace], samples: Sequence[Sample]) -> dict[str, list[StepNote]]:
    notes: dict[str, list[StepNote]] = {}
    for trace, sample in zip(traces, samples, strict=True):
        notes.setdefault(sample.task, []).extend(
            StepNote(
                asked=step.asked,
                drafted=len(step.tokens),
                kept=len(step.path),
                seconds=step.seconds,
                steady=number >= SKIPPED,
                draft_s=step.draft_s,
            )
            for number, step in enumerate(trace.steps)
        )
    return notes


def conditional_acceptance(steps: Sequence[StepNote], length: int) -> list[float]:
    """P(i-th token kept | i - 1 kept, i asked for), i = 1..length."""
    curve, before = [], 0.5
    for depth in range(1, length + 1):
        tried = [step for step in steps if step.asked >= depth and step.kept >= depth - 1]
        kept = sum(step.kept >= depth for step in tried)
        before = (kept + PRIOR_TRIES * before) / (len(tried) + PRIOR_TRIES)
        curve.append(before)
    return curve


def survival(steps: Sequence[StepNote], length: int) -> list[float]:
    """S(1) .. S(length) of nested drafts."""
    curve, product = [], 1.0
    for acceptance in conditional_acceptance(steps, length):
        product *= acceptance
        curve.append(product)
    return curve


def mean_kept(steps: Sequence[StepNote], size: int, *, nested: bool) -> float | None:
    """Draft tokens kept by a step that asks for `size` nodes; None where none was ever asked so much."""
    if nested:
        return sum(survival(steps, size)) if any(step.asked for step in steps) else None
    kept = [step.kept for step in steps if step.asked == size]
    return sum(kept) / len(kept) if kept else None


def offered_widths(steps: Sequence[StepNote], size: int, *, nested: bool) -> list[int]:
    """Nodes drafted by steps that ask for `size`."""
    if nested:
        return [min(step.drafted, size) for step in steps if step.asked >= size]
    return [step.drafted for step in steps if step.asked == size]
