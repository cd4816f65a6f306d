"""The best few against plain decoding, on prompts that no probe has seen, prompt by prompt in turn.

A race: every few prompts, whoever is surely slower than the leader retires, so most of the time goes into telling the best apart.
Only the decode phase counts: seconds of steps without the feeding of prompts, a group's first step left out; seconds per token
are compared, because sampled texts differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from outrider.lab.configuration import Configuration
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.result import Interval, Record
from outrider.lab.runner import Contender, Trace
from outrider.lab.tune.probe import Sample

ROUND = 4  # groups between two looks at the race
MAX_OTHER_CPU = 0.15  # share of the processors; a run beside busier neighbours is repeated
REPEATS = 2


class Lap(Record):
    """One configuration on one group of prompts."""

    configuration: str
    group: int
    task: str
    seconds: float  # decode phase
    tokens: int
    steps: int  # of single rows
    texts: list[str]  # digests of the token ids, for comparing
    other_cpu: float


class Confirmed(Record):
    """What a finalist really did."""

    configuration: str
    speedup: Interval  # plain seconds per token / its seconds per token, prompts resampled
    by_task: dict[str, Interval]
    tokens_per_s: float
    tau: float
    groups: int  # of prompts, before it retired
    identical: int | None  # greedy texts equal to plain decoding's; None: sampled
    texts: int


def race(
    plain: Contender, finalists: Sequence[Contender], groups: Sequence[Sequence[Sample]], batch_size: int,
    journal: Journal, progress: Progress,
) -> list[Lap]:  # fmt: skip
    """Laps of everybody, until the groups are used up or one is left; resumes from the journal."""
    progress.stage("confirming the best", len(groups) * (1 + len(finalists)))
    laps: list[Lap] = []
    running = list(finalists)
    for number, group in enumerate(groups):
        field = [plain, *running]
        for place in range(len(field)):
            contender = field[(place + number) % len(field)]
            laps.append(_lap(contender, number, group, batch_size, journal))
            progress.advance()
        if (number + 1) % ROUND == 0 and len(running) > 1:
            running = _still_running(plain, running, laps)
    return laps


def _lap(contender: Contender, number: int, group: Sequence[Sample], batch_size: int, journal: Journal) -> Lap:
    label = contender.configuration.label
    key = f"lap {label} / {number}"
    if key in journal:
        return Lap.model_validate(journal[key])
    attempts = [_run(contender, number, group, batch_size)]
    while attempts[-1].other_cpu > MAX_OTHER_CPU and len(attempts) <= REPEATS and not contender.keeps_learning:
        attempts.append(_run(contender, number, group, batch_size))
    best = min(attempts, key=lambda lap: lap.other_cpu)
    journal.add(key, best.model_dump())
    return best


def _run(contender: Contender, number: int, group: Sequence[Sample], batch_size: int) -> Lap:
    traces = contender.run([one.tokens for one in group], [one.params for one in group], batch_size)
    seconds, tokens = decode_phase(traces)
    return Lap(
        configuration=contender.configuration.label, group=number, task=group[0].task, seconds=seconds, tokens=tokens,
        steps=sum(len(trace.steps) - 1 for trace in traces), texts=[_digest(trace) for trace in traces],
        other_cpu=traces[0].other_cpu,
    )  # fmt: skip


def decode_phase(traces: Sequence[Trace]) -> tuple[float, int]:
    """(seconds, tokens) of the steps of a batch but its rows' first ones; a step that several rows share counts once."""
    seconds: dict[float, float] = {}
    tokens = 0
    for trace in traces:
        for step in trace.steps[1:]:
            seconds[step.at_s] = step.seconds
            tokens += step.taken
    return sum(seconds.values()), tokens


def summarise(laps: Sequence[Lap], plain: Configuration, *, greedy: bool) -> list[Confirmed]:
    """Every finalist over plain decoding on the groups that it ran."""
    base = {lap.group: lap for lap in laps if lap.configuration == plain.label}
    labels = dict.fromkeys(lap.configuration for lap in laps if lap.configuration != plain.label)
    return [_summary([lap for lap in laps if lap.configuration == label], base, greedy=greedy) for label in labels]


def _summary(laps: Sequence[Lap], base: dict[int, Lap], *, greedy: bool) -> Confirmed:
    same = [mine == theirs for lap in laps for mine, theirs in zip(lap.texts, base[lap.group].texts, strict=True)]
    tasks = dict.fromkeys(lap.task for lap in laps)
    return Confirmed(
        configuration=laps[0].configuration,
        speedup=_speedup(laps, base),
        by_task={task: _speedup([lap for lap in laps if lap.task == task], base) for task in tasks},
        tokens_per_s=sum(lap.tokens for lap in laps) / sum(lap.seconds for lap in laps),
        tau=sum(lap.tokens for lap in laps) / max(sum(lap.steps for lap in laps), 1),
        groups=len(laps),
        identical=sum(same) if greedy else None,
        texts=len(same),
    )


def _speedup(laps: Sequence[Lap], base: dict[int, Lap]) -> Interval:
    """Over the same groups."""
    both = paired_seconds(laps, base).values()
    return ratio_of_sums([plain for plain, _ in both], [own for _, own in both])


def paired_seconds(laps: Sequence[Lap], base: dict[int, Lap]) -> dict[int, tuple[float, float]]:
    """Group -> seconds of plain decoding and of a configuration, both for the number of tokens that plain decoding wrote."""
    return {
        lap.group: (base[lap.group].seconds, lap.seconds / max(lap.tokens, 1) * base[lap.group].tokens) for lap in laps
    }


def _still_running(plain: Contender, running: Sequence[Contender], laps: Sequence[Lap]) -> list[Contender]:
    """All but those whose interval lies below the leader's."""
    found = {one.configuration: one.speedup for one in summarise(laps, plain.configuration, greedy=False)}
    best = max(found[one.configuration.label].low for one in running)
    return [one for one in running if found[one.configuration.label].high >= best]


def _digest(trace: Trace) -> str:
    return hashlib.sha256(str(trace.completion.token_ids).encode()).hexdigest()[:12]
