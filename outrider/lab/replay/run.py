"""`outrider replay` as a whole: every configuration on every text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.counted import counted
from outrider.errors import ConfigError
from outrider.lab.configuration import Configuration
from outrider.lab.predict import StepCosts
from outrider.lab.progress import Progress
from outrider.lab.replay.replay import replay, replayable_parts
from outrider.lab.replay.replay_result import ReplayedConfiguration, ReplayResult
from outrider.lab.replay.summary import summarise
from outrider.lab.replay.texts import Log
from outrider.models.loaded import LoadedModel

SHOWN = 3  # requests in a note


def check_replay(configurations: Sequence[Configuration], costs: StepCosts | None) -> None:
    """Raises ConfigError and CapabilityError for what cannot be replayed, before any work."""
    for configuration in configurations:
        replayable_parts(configuration)
    if costs is not None and costs.num_rows > 1:
        raise ConfigError(
            f"the result's steps decode {costs.num_rows} texts at once, and a replay one at a time: measure with --batch-size 1"
        )


def run_replay(
    configurations: Sequence[Configuration],
    log: Log,
    target: LoadedModel,
    *,
    workload: str,
    costs: StepCosts | None = None,
    notes: Sequence[str] = (),
    progress: Progress,
) -> ReplayResult:
    """The result of all configurations, which `check_replay` let pass."""
    replayed = [
        summarise(replay(log.texts, configuration, target=target, progress=progress), log.texts, costs)
        for configuration in configurations
    ]
    return ReplayResult(
        workload=workload,
        tokenizer=target.name,
        num_texts=len(log.texts),
        num_tokens=sum(len(text.answer) for text in log.texts),
        skipped=log.skipped,
        costs=costs,
        configurations=replayed,
        notes=[*notes, *_notes(replayed, log)],
    )


def _notes(replayed: Sequence[ReplayedConfiguration], log: Log) -> Iterator[str]:
    """What a reader should know about these numbers."""
    yield "Texts are the log's, cut into tokens again; a model may have emitted the same text in other tokens."
    if any(one.learns for one in replayed):
        yield (
            "Some drafters learn from one text for the next; they met the texts in the order of the log, beginning with no "
            "memory."
        )
    if outside := sum(one.outside_costs for one in replayed):
        yield f"{outside} steps drafted more tokens than any that bench timed; their cost is a straight line's guess."
    if log.skipped:
        more = " ..." if len(log.skipped) > SHOWN else ""
        yield f"{counted(len(log.skipped), 'request')} left out: {'; '.join(log.skipped[:SHOWN])}{more}"
