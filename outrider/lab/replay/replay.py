"""Replay: how many tokens a model-free drafter would have saved on texts that were already written.

The real drafter runs on each prompt and is judged by the logged answer (`loop.py`). docs/algorithms/replay.md says why that is
exact, in which orders drafters that learn meet the texts, and what is refused by name.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.draft_length import FixedLength
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter
from outrider.drafters.composite import CompositeDrafter
from outrider.errors import CapabilityError, ConfigError, OutriderError, in_words
from outrider.lab.configuration import PLAIN, Configuration
from outrider.lab.progress import QUIET, Progress
from outrider.lab.replay.loop import LoggedRow, ReplayLoop, text_target
from outrider.lab.replay.texts import Text
from outrider.models.loaded import LoadedModel
from outrider.parts import Parts
from outrider.run import has_ended, run_rows
from outrider.stats import DecodeStats
from outrider.verifiers import VERIFIERS

TRIAL, TRIAL_VOCABULARY = Text([1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2]), 1000  # what a drafter is tried on
ROWS_TOGETHER = 16  # where rows do not touch one another, several at once are quicker, with the same result
Order = Literal["logged", "shuffled", "alone"]


def replayable_parts(configuration: Configuration) -> Parts:
    """What it means. Raises ConfigError for unknown names and values, CapabilityError for what cannot be replayed."""
    verifier = configuration.verifier
    if verifier != "auto" and not VERIFIERS.load(verifier).lossless:
        raise CapabilityError(
            f"verifier '{verifier}' keeps tokens that the target would not emit, so the log does not show which; "
            "replay with a lossless one"
        )
    parts = configuration.parts()
    if reason := _why_not(parts):
        replayable = ", ".join(sort_drafters().replayable)
        raise CapabilityError(
            f"drafter '{configuration.drafter}' {reason}, and a replay has only text. Replayable: {replayable}, "
            "and composites of these; measure the others with 'outrider bench'"
        )
    if parts.length.is_auto:
        raise CapabilityError(
            f"'{configuration.label}': k=auto follows the clock, and a replay has none: give a number, like "
            f"k={parts.length.max_nodes}, or replay every length with --sweep"
        )
    return parts


@dataclass(frozen=True)
class SortedDrafters:
    """All registered drafters, plain decoding and composites left out, by whether they can be replayed."""

    replayable: list[str]  # whatever options they need
    unusable: list[str]  # a line about each drafter that cannot be imported, or fails on a toy text

    @property
    def configurations(self) -> list[Configuration]:
        """Every replayable drafter that needs no option."""
        configurations = []
        for name in self.replayable:
            try:
                Configuration(name).parts()
            except OutriderError:  # needs an option, like retrieval its corpus
                continue
            configurations.append(Configuration(name))
        return configurations


def sort_drafters() -> SortedDrafters:
    """Which registered drafters can be replayed. One that is broken must not keep the others from it."""
    replayable = []
    unusable = [f"not replayed: {reason}" for reason in DRAFTERS.broken().values()]
    for name in DRAFTERS.importable():
        try:
            if name not in (PLAIN, "composite") and _reads_only_text(name):
                replayable.append(name)
        except Exception as error:  # noqa: BLE001  a third party's drafter may raise anything
            unusable.append(f"not replayed: drafter '{name}' fails on a toy text: {in_words(error)}")
    return SortedDrafters(replayable, unusable)


def _why_not(parts: Parts) -> str:
    """Why a drafter cannot be replayed, in words; empty when it can."""
    if issubclass(parts.drafter, CompositeDrafter):
        for name, (kind, settings) in parts.drafter.part_classes(parts.drafter_settings).items():
            if reason := _why_not_alone(name, kind, settings):
                return f"has the part '{name}', which {reason}"
        return ""
    return _why_not_alone(parts.drafter_name, parts.drafter, parts.drafter_settings)


def _why_not_alone(name: str, kind: type[Drafter], settings: Any) -> str:
    required = kind.requirements(settings)
    if required.draft:
        return "runs a draft model"
    if required.module:
        return "runs on the target's own weights"
    if required.prediction:
        return "follows what a request predicts"
    if not kind.keeps_costs:
        return "asks a draft service"
    return "" if _reads_only_text(name) else "learns from the target's passes"


def _reads_only_text(name: str) -> bool:
    """Class attributes say who runs a model; who reads what a target's pass brings shows on a few words."""
    kind = DRAFTERS.load(name)
    if kind.requires.draft or kind.requires.module or kind.requires.head or not kind.keeps_costs:
        return False
    try:
        parts = Configuration(name).parts()
    except OutriderError:
        return True  # needs an option; should it read more than text, its first step says so
    if parts.requirements.prediction:
        return False
    try:
        try_on_text(parts, name)
    except CapabilityError:
        return False
    return True


def try_on_text(parts: Parts, name: str) -> None:
    """A few steps on a toy text. Raises CapabilityError when the drafter wants a model."""
    target = text_target(None, TRIAL_VOCABULARY)
    loop = ReplayLoop(name, parts.make_drafter(target, None), FixedLength(parts.length.max_nodes), TRIAL_VOCABULARY)
    loop.add(LoggedRow.of(TRIAL, 0))
    while not loop.rows[0].finish_reason:
        loop.step()


@dataclass(frozen=True)
class ReplayedText:
    """What one configuration did on one text."""

    stats: DecodeStats  # of time, only `time_s["draft"]`: seconds in the drafter
    widths: Counter[int]  # draft nodes in the widest row of a step -> steps: what a pass costs depends on that
    origins: list[str]  # of each answer token: "accepted", "correction", "bonus" or "plain"


@dataclass(frozen=True)
class Replay:
    """One configuration on all texts."""

    configuration: Configuration
    texts: list[ReplayedText]  # in the order given
    order: list[int]  # in which they were replayed: numbers of texts
    learns: bool  # one text's result depends on the texts before it
    seconds: float  # the whole replay, not only the drafter

    @property
    def total(self) -> DecodeStats:
        """The sum over all texts."""
        return sum_stats([text.stats for text in self.texts])


def replay(
    texts: Sequence[Text], configuration: Configuration, *, target: LoadedModel | None = None, order: Order = "logged",
    seed: int = 0, max_num_seqs: int = 1, progress: Progress = QUIET,
) -> Replay:  # fmt: skip
    """Replays texts through one configuration.

    Raises ConfigError and CapabilityError for what cannot be replayed, before the first text.

    `target`: `load_text_target`, for drafters that ask for a tokenizer or keep files per vocabulary.
    """
    parts = replayable_parts(configuration)
    _check(texts, max_num_seqs)
    target = target or text_target(None, 1 + max(max(*text.prompt, *text.answer) for text in texts))
    numbers, is_one_by_one = list(range(len(texts))), max_num_seqs == 1
    done: dict[int, ReplayedText] = {}
    together = ROWS_TOGETHER if is_one_by_one and not parts.drafter.learns else max_num_seqs

    def run(some: Sequence[int]) -> None:
        """With a drafter that is new. It is not closed: a replay leaves no files."""
        size, drafter = target.lm.shape.vocab_size, parts.make_drafter(target, None)
        loop = ReplayLoop(configuration.drafter, drafter, FixedLength(parts.length.max_nodes), size)
        widths: dict[int, Counter[int]] = {number: Counter() for number in some}
        rows = (LoggedRow.of(texts[number], number) for number in some)
        for stepped in run_rows(loop, rows, together):  # rows join and leave as in `LLM.generate`: who learns sees the same order
            for row, length in zip(stepped, loop.drafted, strict=True):
                widths[row.request][length if is_one_by_one else max(loop.drafted)] += 1
            for row in filter(has_ended, reversed(stepped)):
                done[row.request] = ReplayedText(row.stats, widths[row.request], row.origins)
                progress.advance()

    if order == "shuffled":
        random.Random(seed).shuffle(numbers)
    learns = parts.drafter.learns and order != "alone"
    progress.stage(f"replay {configuration.label}", len(texts))
    began = time.perf_counter()
    if order == "alone" and parts.drafter.learns:
        for number in numbers:
            run([number])
    else:
        run(numbers)
    seconds = time.perf_counter() - began
    found = Replay(configuration, [done[number] for number in range(len(texts))], numbers, learns, seconds)
    progress.say(f"{configuration.label}: {found.total.emitted / seconds:,.0f} tokens/s replayed")
    return found


def sum_stats(stats: Sequence[DecodeStats]) -> DecodeStats:
    """The sum of all of them."""
    total = DecodeStats()
    for one in stats:
        total = total.merge(one)
    return total


def _check(texts: Sequence[Text], max_num_seqs: int) -> None:
    if not texts:
        raise ConfigError("there is nothing to replay: no text has an answer")
    for number, text in enumerate(texts):
        if not text.prompt or not text.answer:
            raise ConfigError(f"text {text.id or number}: prompt and answer need a token at least, to be replayed")
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
