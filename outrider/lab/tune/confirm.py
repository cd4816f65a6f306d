"""Laps: one configuration on one group of prompts that no probe has seen; and what its laps together say.

Only the decode phase counts: seconds of steps without the feeding of prompts, a group's first step left out; seconds per token
are compared, because sampled texts differ. Who runs how many laps is decided in `race.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from pydantic import Field

from outrider.lab.configuration import Configuration
from outrider.lab.disturbance import Repeats
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.journal import Journal
from outrider.lab.result import Interval, Record
from outrider.lab.runner import Contender, Trace
from outrider.lab.tune.beliefs import Belief, Laps
from outrider.lab.tune.probe import Sample

MAX_OTHER_CPU = 0.15  # share of the processors; a run beside busier neighbours is repeated
REPEATS = 2
ALL = "all"


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
    wall_s: float = 0.0  # of the whole run, prompts and repeated attempts included; results before 2026-11-22 do not say


class Confirmed(Record):
    """What a finalist really did."""

    configuration: str
    speedup: Interval  # plain seconds per token / its seconds per token, prompts resampled
    by_task: dict[str, Interval]
    estimates: dict[str, float] = Field(default_factory=dict)  # "all" and by task: speedups that the choice goes by (beliefs.py)
    tokens_per_s: float
    tau: float
    groups: int  # of prompts, before it retired
    identical: int | None  # greedy texts equal to plain decoding's; None: sampled
    texts: int


def run_lap(
    contender: Contender, number: int, group: Sequence[Sample], batch_size: int, journal: Journal, repeats: Repeats
) -> Lap:
    """From the journal, or run now; beside busy neighbours the calmest of a few attempts."""
    label = contender.configuration.label
    key = f"lap {label} / {number}"
    if key in journal:
        return Lap.model_validate(journal[key])
    attempts: list[Lap] = []

    def attempt() -> Lap:
        attempts.append(_run(contender, number, group, batch_size))
        return attempts[-1]

    best, _ = repeats.calmest(attempt, lambda lap: lap.other_cpu, 0 if contender.keeps_learning else REPEATS)
    best = best.model_copy(update={"wall_s": sum(lap.wall_s for lap in attempts)})
    journal.add(key, best.model_dump())
    return best


def _run(contender: Contender, number: int, group: Sequence[Sample], batch_size: int) -> Lap:
    traces = contender.run([one.tokens for one in group], [one.params for one in group], batch_size)
    wall_s = max(trace.steps[-1].at_s for trace in traces) - traces[0].began_s
    seconds, tokens = decode_phase(traces)
    return Lap(
        configuration=contender.configuration.label, group=number, task=group[0].task, seconds=seconds, tokens=tokens,
        steps=sum(len(trace.steps) - 1 for trace in traces), texts=[_digest(trace) for trace in traces],
        other_cpu=traces[0].other_cpu, wall_s=wall_s,
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


def log_seconds(laps: Sequence[Lap], task: str | None = None) -> Laps:
    """Log seconds of every lap that decoded anything, for `beliefs.py`; `task` None: of all tasks."""
    found: dict[str, dict[int, float]] = {}
    for lap in laps:
        if lap.tokens and lap.seconds > 0 and task in (None, lap.task):
            found.setdefault(lap.configuration, {})[lap.group] = math.log(lap.seconds / lap.tokens)
    return found


def summarise(
    laps: Sequence[Lap], plain: Configuration, *, greedy: bool, beliefs: Mapping[str, Belief] | None = None
) -> list[Confirmed]:
    """Every finalist over plain decoding, without those whose first steps ended the text: nothing of them was timed. `beliefs`:
    "all" and by task."""
    base = {lap.group: lap for lap in laps if lap.configuration == plain.label}
    found = []
    for label in dict.fromkeys(lap.configuration for lap in laps if lap.configuration != plain.label):
        own = [lap for lap in laps if lap.configuration == label]
        if (speedup := _speedup(own, base)) is not None:
            found.append(_summary(own, speedup, base, beliefs or {}, greedy=greedy))
    return found


def _summary(
    laps: Sequence[Lap], speedup: Interval, base: dict[int, Lap], beliefs: Mapping[str, Belief], *, greedy: bool
) -> Confirmed:
    label = laps[0].configuration
    both = [lap for lap in laps if lap.group in base]
    same = [ours == theirs for lap in both for ours, theirs in zip(lap.texts, base[lap.group].texts, strict=True)]
    by_task = {task: [lap for lap in laps if lap.task == task] for task in dict.fromkeys(lap.task for lap in laps)}
    return Confirmed(
        configuration=label,
        speedup=speedup,
        by_task={task: one for task, ours in by_task.items() if (one := _speedup(ours, base)) is not None},
        estimates={task: one.speedup(label) for task, one in beliefs.items() if task == ALL or task in by_task},
        tokens_per_s=sum(lap.tokens for lap in laps) / sum(lap.seconds for lap in laps),
        tau=sum(lap.tokens for lap in laps) / max(sum(lap.steps for lap in laps), 1),
        groups=len(laps),
        identical=sum(same) if greedy else None,
        texts=len(same),
    )


def _speedup(laps: Sequence[Lap], base: dict[int, Lap]) -> Interval | None:
    """None where no group was timed on both sides."""
    both = list(paired_seconds(laps, base).values())
    return ratio_of_sums([plain for plain, _ in both], [own for _, own in both]) if both else None


def paired_seconds(laps: Sequence[Lap], base: dict[int, Lap]) -> dict[int, tuple[float, float]]:
    """Seconds of plain decoding and of a configuration by group, both for the tokens that plain decoding wrote.

    Groups that either finished in its first step are left out.
    """
    return {
        lap.group: (base[lap.group].seconds, lap.seconds / lap.tokens * base[lap.group].tokens)
        for lap in laps
        if lap.group in base and lap.tokens and base[lap.group].tokens
    }


def _digest(trace: Trace) -> str:
    return hashlib.sha256(str(trace.completion.token_ids).encode()).hexdigest()[:12]
