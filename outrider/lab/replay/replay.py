"""Replay: how many tokens a look-up drafter would have saved on texts that were already written.

The real drafter runs on each prompt and is judged by the logged answer (`loop.py`).
docs/algorithms/replay.md says why that is exact, and what is refused by name.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from outrider.configuration import PLAIN, Configuration
from outrider.draft_length import FixedLength
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter
from outrider.drafters.composite import CompositeDrafter
from outrider.drafters.requirements import Requirements
from outrider.errors import CapabilityError, ConfigError, OutriderError, counted
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.predict import StepCosts
from outrider.lab.progress import QUIET, Progress
from outrider.lab.replay.loop import LoggedRow, ReplayLoop, text_target
from outrider.lab.replay.replay_result import AcceptanceCounts, ReplayedConfiguration, ReplayResult
from outrider.lab.replay.texts import Log, Text
from outrider.lab.result import Interval
from outrider.models.loaded import LoadedModel
from outrider.parts import Parts
from outrider.run import has_ended, run_rows
from outrider.stats import DecodeStats
from outrider.verifiers import VERIFIERS

# of drafters that do not learn: several rows at once are quicker, with the same result
ROWS_TOGETHER = 16


@dataclass(frozen=True)
class ReplayedText:
    """The result of one configuration on one text."""

    stats: DecodeStats  # of time, only `time_s["draft"]`: seconds in the drafter
    widths: Counter[int]  # draft tokens -> steps with that number of them
    origins: list[str]  # of each answer token: "accepted", "correction", "bonus" or "plain"


@dataclass(frozen=True)
class Replay:
    """One configuration on all texts, in their order."""

    configuration: Configuration
    texts: list[ReplayedText]
    learns: bool  # one text's result depends on the texts before it

    @property
    def total(self) -> DecodeStats:
        return _total(self.texts)


def replay(
    texts: Sequence[Text],
    configuration: Configuration,
    *,
    target: LoadedModel | None = None,
    progress: Progress = QUIET,
) -> Replay:
    """Replays texts through one configuration. A drafter that learns meets them in their order, and
    begins with no memory.

    `target`: of `load_text_target`, for drafters that ask for a tokenizer or keep files per
    vocabulary. Raises ConfigError and CapabilityError for what cannot be replayed, before the first
    text.
    """
    parts = replayable_parts(configuration)
    _check(texts)
    target = target or text_target(None, 1 + max(max(*text.prompt, *text.answer) for text in texts))
    drafter = parts.make_drafter(target, None)  # never closed: a replay leaves no files
    loop = ReplayLoop(
        configuration.drafter,
        drafter,
        FixedLength(parts.length.max_nodes),
        target.lm.shape.vocab_size,
    )
    together = 1 if parts.drafter.learns else ROWS_TOGETHER
    rows = (LoggedRow.of(text, number) for number, text in enumerate(texts))
    widths: list[Counter[int]] = [Counter() for _ in texts]
    done: dict[int, ReplayedText] = {}
    progress.stage(f"replay {configuration.label}", len(texts))
    began = time.perf_counter()
    for stepped in run_rows(loop, rows, together):
        for row, drafted in zip(stepped, loop.drafted, strict=True):
            widths[row.request][drafted] += 1
        for row in filter(has_ended, reversed(stepped)):
            done[row.request] = ReplayedText(row.stats, widths[row.request], row.origins)
            progress.advance()
    seconds = time.perf_counter() - began
    in_order = [done[number] for number in range(len(texts))]
    replayed = Replay(configuration, in_order, parts.drafter.learns)
    progress.say(
        f"{configuration.label}: {replayed.total.emitted / seconds:,.0f} tokens/s replayed"
    )
    return replayed


def replayable_parts(configuration: Configuration) -> Parts:
    """The configuration that the text means. Raises ConfigError for unknown names and values,
    CapabilityError for one that cannot be replayed."""
    verifier = configuration.verifier
    if verifier != "auto" and not VERIFIERS.load(verifier).lossless:
        raise CapabilityError(
            f"verifier '{verifier}' keeps tokens that the target would not emit, so the log does "
            "not show which; replay with a lossless one"
        )
    parts = configuration.parts()
    kinds: list[type[Drafter]] = [parts.drafter]
    if issubclass(parts.drafter, CompositeDrafter):
        names = parts.drafter.part_classes(parts.drafter_settings)
        kinds = [DRAFTERS.load(name) for name in names]
    if not (_reads_text_alone(parts.requirements) and all(map(_is_replayable, kinds))):
        raise CapabilityError(
            f"drafter '{configuration.drafter}' needs more than text: a model, or what the "
            f"target's passes bring. Replayable: {', '.join(replayable_drafters())}, and "
            "composites of these; measure the others with 'outrider bench'"
        )
    if parts.length.is_auto:
        raise CapabilityError(
            f"'{configuration.label}': k=auto follows the clock, and a replay has none: give a "
            f"number, like k={parts.length.max_nodes}"
        )
    return parts


def replayable_drafters() -> list[str]:
    """Registered drafters that need text alone, whatever options they need; plain decoding and
    composites left out."""
    names = (name for name in DRAFTERS.importable() if name not in (PLAIN, "composite"))
    return [name for name in names if _is_replayable(DRAFTERS.load(name))]


def default_configurations() -> tuple[list[Configuration], list[str]]:
    """Every replayable drafter that needs no option, and a line about each that cannot be
    imported."""
    broken = [f"not replayed: {reason}" for reason in DRAFTERS.broken().values()]
    configurations = []
    for name in replayable_drafters():
        with contextlib.suppress(OutriderError):  # like retrieval, which needs its corpus
            Configuration(name).parts()
            configurations.append(Configuration(name))
    return configurations, broken


def _total(texts: Sequence[ReplayedText]) -> DecodeStats:
    return reduce(DecodeStats.merge, (text.stats for text in texts), DecodeStats())


def _is_replayable(kind: type[Drafter]) -> bool:
    return _reads_text_alone(kind.requires) and kind.keeps_costs


def _reads_text_alone(required: Requirements) -> bool:
    """No model, none of its numbers, and no prediction, which takes its place."""
    return not (
        required.draft or required.head or required.module or required.logits or required.prediction
    )


def _check(texts: Sequence[Text]) -> None:
    if not texts:
        raise ConfigError("there is nothing to replay: no text has an answer")
    for number, text in enumerate(texts):
        if not text.prompt or not text.answer:
            raise ConfigError(
                f"text {text.id or number}: prompt and answer need a token at least, to be replayed"
            )


MIN_BLOCKS = 5  # texts or blocks; an interval from fewer would be a guess


def summarise(
    replayed: Replay, texts: Sequence[Text], costs: StepCosts | None = None
) -> ReplayedConfiguration:
    """`texts`: those that were replayed."""
    by_task: dict[str, list[ReplayedText]] = {}
    for text, outcome in zip(texts, replayed.texts, strict=True):
        by_task.setdefault(text.task, []).append(outcome)
    return ReplayedConfiguration(
        configuration=replayed.configuration.label,
        drafter=replayed.configuration.drafter,
        overall=acceptance(replayed.texts, costs, blocks=replayed.learns),
        by_task={
            task: acceptance(by_task[task], costs, blocks=replayed.learns)
            for task in sorted(by_task)
        },
        draft_s_per_step=replayed.total.time_s["draft"] / replayed.total.steps,
        learns=replayed.learns,
        outside_costs=0
        if costs is None
        else sum(
            count
            for text in replayed.texts
            for width, count in text.widths.items()
            if costs.step_s(width)[1]
        ),
    )


def acceptance(
    texts: Sequence[ReplayedText], costs: StepCosts | None, *, blocks: bool
) -> AcceptanceCounts:
    """Acceptance of some texts, in the order they were replayed. `blocks`: they depend on one
    another."""
    total = _total(texts)
    emitted = [text.stats.emitted for text in texts]
    speedup = None
    if costs is not None:  # in plain steps, each by its own draft; plain decoding pays one a token
        paid = [
            sum(count * costs.relative(width) for width, count in text.widths.items())
            for text in texts
        ]
        speedup = ratio_interval(emitted, paid, blocks=blocks)
    return AcceptanceCounts(
        num_texts=len(texts),
        steps=total.steps,
        emitted=total.emitted,
        drafted=total.drafted,
        tested=total.tested,
        accepted=total.accepted,
        accepted_per_position=total.accepted_per_position,
        tau=ratio_interval(emitted, [text.stats.steps for text in texts], blocks=blocks),
        alpha=total.alpha,
        draft_utilisation=total.draft_utilisation,
        speedup=speedup,
    )


def ratio_interval(above: Sequence[float], below: Sequence[float], *, blocks: bool) -> Interval:
    """sum(above) / sum(below), a number of each per text. Unknown for too few texts."""
    starts = np.arange(0, len(above), block_length(len(above)) if blocks else 1)
    if len(starts) < MIN_BLOCKS:
        return Interval.unknown(sum(above) / sum(below))
    sums = [
        np.add.reduceat(np.asarray(column, dtype=np.float64), starts).tolist()
        for column in (above, below)
    ]
    return ratio_of_sums(*sums)


def block_length(num_texts: int) -> int:
    """Consecutive texts per block: n^(1/3), rounded."""
    return max(1, round(num_texts ** (1 / 3)))


SHOWN = 3  # requests in a note


def check_replay(configurations: Sequence[Configuration], costs: StepCosts | None) -> None:
    """Raises ConfigError and CapabilityError for what cannot be replayed, before any work."""
    for configuration in configurations:
        replayable_parts(configuration)
    if costs is not None and costs.num_rows > 1:
        raise ConfigError(
            f"the result's steps decode {costs.num_rows} texts at once, and a replay one at a "
            "time: measure with --batch-size 1"
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
        summarise(
            replay(log.texts, configuration, target=target, progress=progress), log.texts, costs
        )
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
    yield "Texts are the log's, cut into tokens again; a model may have emitted the same text in other tokens."
    if any(replay.learns for replay in replayed):
        yield (
            "Some drafters learn from one text for the next; they met the texts in the order of the log, beginning with no "
            "memory."
        )
    if outside := sum(replay.outside_costs for replay in replayed):
        yield f"{outside} steps drafted more tokens than any that bench timed; their cost is a straight line's guess."
    if log.skipped:
        more = " ..." if len(log.skipped) > SHOWN else ""
        yield f"{counted(len(log.skipped), 'request')} left out: {'; '.join(log.skipped[:SHOWN])}{more}"
