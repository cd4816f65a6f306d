"""Replay: how many tokens a model-free drafter would have saved on texts that were already written.

The real drafter runs on each prompt and is judged by the logged answer (`loop.py`). No model is loaded, and drafters are
quick: tens of thousands of tokens a second and processor.

Drafters that learn across texts meet the texts in an order. "logged": as they were written, one after the other (or, with
`max_num_seqs`, as that many at a time would be served). "shuffled": in a seeded random order; if that changes the result,
the order of the log mattered. "alone": a drafter that knows nothing yet for every text.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.errors import ConfigError
from outrider.lab.configuration import Configuration
from outrider.lab.progress import QUIET, Progress
from outrider.lab.replay.drafters import replayable_parts
from outrider.lab.replay.loop import LoggedRow, ReplayLoop
from outrider.lab.replay.target import text_target
from outrider.lab.replay.texts import Text
from outrider.models.loading.load import LoadedModel
from outrider.parts import Parts
from outrider.rows import Row
from outrider.run import has_ended, run_rows
from outrider.stats import DecodeStats

ROWS_TOGETHER = 16  # where rows do not touch one another, several at once are quicker, with the same result
Order = Literal["logged", "shuffled", "alone"]


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
    """Raises ConfigError and CapabilityError for what cannot be replayed, before the first text.

    `target`: `load_text_target`, for drafters that ask for a tokenizer or keep files per vocabulary.
    """
    parts = replayable_parts(configuration)
    _check(texts, max_num_seqs)
    target = target or text_target(None, 1 + max(max(*text.prompt, *text.answer) for text in texts))
    run = _ReplayRun(texts, configuration, parts, target, max_num_seqs, progress)
    numbers = list(range(len(texts)))
    if order == "shuffled":
        random.Random(seed).shuffle(numbers)
    learns = parts.drafter.learns and order != "alone"
    run.progress.stage(f"replay {configuration.label}", len(texts))
    began = time.perf_counter()
    if order == "alone" and parts.drafter.learns:
        for number in numbers:
            run.replay([number])
    else:
        run.replay(numbers)
    seconds = time.perf_counter() - began
    found = Replay(configuration, [run.done[number] for number in range(len(texts))], numbers, learns, seconds)
    run.progress.say(f"{configuration.label}: {found.total.emitted / seconds:,.0f} tokens/s replayed")
    return found


def sum_stats(stats: Sequence[DecodeStats]) -> DecodeStats:
    """The sum of all of them."""
    total = DecodeStats()
    for one in stats:
        total = total.merge(one)
    return total


class _ReplayRun:
    """One configuration at work."""

    def __init__(
        self, texts: Sequence[Text], configuration: Configuration, parts: Parts, target: LoadedModel, max_num_seqs: int,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._texts, self._name, self._parts, self._target = texts, configuration.drafter, parts, target
        self._one_by_one = max_num_seqs == 1
        apart = parts.drafter.learns or not self._one_by_one
        self._rows_together = max_num_seqs if apart else ROWS_TOGETHER
        self.progress = progress
        self.done: dict[int, ReplayedText] = {}

    def replay(self, numbers: Sequence[int]) -> None:
        """These texts, one after the other, with one drafter that is new. It is not closed: a replay leaves no files."""
        drafter: Drafter = self._parts.make_drafter(self._target, None)
        loop = ReplayLoop(self._name, drafter, FixedLength(self._parts.length.max_nodes), self._target.lm.shape.vocab_size)
        widths: dict[int, Counter[int]] = {number: Counter() for number in numbers}
        for row in self._run(loop, numbers, widths):
            self.done[row.request] = ReplayedText(row.stats, widths[row.request], row.origins)
            self.progress.advance()

    def _run(self, loop: ReplayLoop, numbers: Sequence[int], widths: dict[int, Counter[int]]) -> Iterator[Row]:
        """Rows that have ended. They join and leave as in `LLM.generate`, so that drafters that learn see the same order."""
        rows = (LoggedRow.of(self._texts[number], number) for number in numbers)
        for stepped in run_rows(loop, rows, self._rows_together):
            for row, length in zip(stepped, loop.drafted, strict=True):
                widths[row.request][length if self._one_by_one else max(loop.drafted)] += 1
            yield from filter(has_ended, reversed(stepped))


def _check(texts: Sequence[Text], max_num_seqs: int) -> None:
    if not texts:
        raise ConfigError("there is nothing to replay: no text has an answer")
    for number, text in enumerate(texts):
        if not text.prompt or not text.answer:
            raise ConfigError(f"text {text.id or number}: prompt and answer need a token at least, to be replayed")
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
