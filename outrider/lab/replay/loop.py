"""The step of `outrider/decode.py` without models: the target is a log, and says next what the log
says.

A drafter that places its tokens, as all do that only copy, is judged so by every lossless verifier,
at every temperature: a placed token is kept exactly when the text continues with it
(docs/algorithms/replay.md). One that asks the target for a pass, or reads numbers out of the logits
it is shown, is refused.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.drafters.proposals import proposed
from outrider.errors import CapabilityError, CheckpointError
from outrider.lab.replay.texts import Text
from outrider.models.card import unknown_card
from outrider.models.lm import LM, LMShape, PassOutput
from outrider.models.loaded import LoadedModel
from outrider.models.loading.context import UNKNOWN_CONTEXT
from outrider.models.loading.load import load_config, load_tokenizer
from outrider.models.source import resolve
from outrider.rows import Row, Rows
from outrider.sampling.params import SamplingParams
from outrider.step import Control, StepFacts
from outrider.stops import StopStrings
from outrider.types import Draft, TargetOutput, Verdict
from outrider.verifiers.base import agreeing_ends, path_verdict

NO_MODEL = "this drafter runs the target's model, so it cannot be replayed: a replay has only text"
CPU = torch.device("cpu")
UNKNOWN = -1  # what the target says where the log does not tell: no draft token is equal to it
NO_LIMIT = 1 << 40


class TextLM(LM):
    """Knows its shape."""

    def __init__(self, shape: LMShape) -> None:
        super().__init__(_no_pass, shape, torch.float32, CPU)  # type: ignore[arg-type]  # never called

    def forward(self, *_: object, **__: object) -> PassOutput:
        """Refuses a pass: this target has no weights. Raises CapabilityError."""
        raise CapabilityError(NO_MODEL)

    def catch_up(self, *_: object, **__: object) -> None:
        """Raises CapabilityError."""
        raise CapabilityError(NO_MODEL)


def _no_pass(*_: object) -> Tensor:
    raise CapabilityError(NO_MODEL)


def text_target(tokenizer: Any, vocab_size: int, name: str = "the log") -> LoadedModel:
    """A `LoadedModel` that knows its vocabulary and nothing else."""
    shape = LMShape(vocab_size, UNKNOWN_CONTEXT, layers=(), sliding_window=None, num_parameters=0)
    return LoadedModel(name, TextLM(shape), unknown_card(vocab_size), tokenizer, frozenset())


def load_text_target(name: str, trust_remote_code: bool = False) -> LoadedModel:
    """From a folder or a hub id: its tokenizer and, for the size of the vocabulary, its config. No
    weights.

    Raises CheckpointError when there is no tokenizer.
    """
    source = resolve(name)
    tokenizer = load_tokenizer(source, trust_remote_code)
    try:
        # may be padded beyond the tokenizer's
        size = load_config(source, trust_remote_code).get_text_config().vocab_size
    except CheckpointError:  # a tokenizer alone will do
        size = len(tokenizer)
    return text_target(tokenizer, max(size, len(tokenizer)), name)


@dataclass
class LoggedRow(Row):
    """A row that ends where its log ends."""

    answer: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, text: Text, number: int) -> LoggedRow:
        """`number`: the caller's, for it."""
        tokens = list(text.prompt)
        answer = list(text.answer)
        limit = NO_LIMIT if text.max_tokens is None else max(text.max_tokens, len(answer))
        return cls(
            request=number,
            tokens=tokens,
            num_prompt=len(tokens),
            params=SamplingParams(),
            seed=0,
            max_tokens=len(tokens) + limit,
            stop_tokens=frozenset(),
            detokenizer=None,
            stops=StopStrings([]),
            answer=answer,
        )

    def add(self, token: int, origin: str) -> None:
        super().add(token, origin)
        if len(self.tokens) == self.num_prompt + len(self.answer):
            self.finish_reason = self.finish_reason or "stop"

    def emitted_after(self, levels: list[int]) -> list[int]:
        """The log's token that many draft tokens ahead, for each of `levels`."""
        begin = len(self.tokens) - self.num_prompt
        end = len(self.answer)
        return [self.answer[begin + level] if begin + level < end else UNKNOWN for level in levels]


class ReplayLoop:
    """A drafter, a control of draft lengths, and the rows they work on: `outrider.decode.Decoder`
    for logs."""

    def __init__(self, name: str, drafter: Drafter, control: Control, vocab_size: int) -> None:
        self._name = name
        self._drafter = drafter
        self._control = control
        self.rows = Rows(vocab_size, CPU)
        self.drafted: list[int] = []  # tokens per row, in the latest step

    def add(self, row: LoggedRow) -> None:
        self._drafter.join(self.rows, row)

    def remove(self, index: int) -> Row:
        """A row leaves; the last row takes its index."""
        self._drafter.stop(index)
        return self.rows.swap_remove(index)

    @torch.inference_mode()
    def step(self) -> None:
        """One step of every row. Raises CapabilityError where a drafter wants a model."""
        rows = self.rows
        began = time.perf_counter()
        asked = self._control.choose(rows)
        draft = proposed(self._drafter, rows, asked)
        if draft.probs is not None:
            raise CapabilityError(
                f"drafter '{self._name}' draws tokens at random, so it cannot be replayed from text"
            )
        drafted = time.perf_counter()
        verdict = self._verdict(draft)
        shape = draft.num_rows, draft.num_nodes + 1, rows.vocab_size
        logits = torch.empty(
            shape, device="meta"
        )  # shapes can be computed with, reading a value raises NotImplementedError
        rows.append(draft, verdict, logits)
        appended = time.perf_counter()
        try:
            self._drafter.commit(rows, draft, verdict, TargetOutput(logits))
        except (
            NotImplementedError
        ) as error:  # torch's word for reading a tensor that has no numbers
            raise CapabilityError(
                f"drafter '{self._name}' learns from the target's logits, which a log does not "
                "have, so it cannot be replayed; measure it with 'outrider bench'"
            ) from error
        ended = time.perf_counter()
        draft_s = drafted - began + ended - appended
        for row in rows:  # shared as in a real step
            row.stats.time_s["draft"] += draft_s / len(rows)
        self._control.observe(StepFacts(rows, asked, draft, verdict, ended - began, draft_s))
        self.drafted = draft.lists[1]

    def _verdict(self, draft: Draft) -> Verdict:
        """`greedy_verdict` of a target that repeats the recorded text. Off that path its choices
        are unknown, and not needed."""
        choice = [
            row.emitted_after(levels)  # type: ignore[attr-defined]
            for row, levels in zip(self.rows, draft.levels, strict=True)
        ]
        ends = agreeing_ends(draft, choice)
        return path_verdict(
            draft, ends, [emitted[end + 1] for emitted, end in zip(choice, ends, strict=True)]
        )
