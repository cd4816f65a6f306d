"""A stand-in for vLLM's old model runner: rows that move, leave, wait and come back, and drafts
verified greedily.

The "model" is a rule from the text so far to the next token, so what a request says never depends
on drafts or neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCABULARY = 40
CONTEXT = 96


def rule(tokens: list[int]) -> int:
    """Copies from six tokens back mostly, so that look-ups find something, and departs from it now
    and then."""
    if len(tokens) < 6 or sum(tokens[-3:]) % 7 == 0 or len(tokens) % 13 == 0:
        return (sum(tokens[-2:]) * 7 + len(tokens)) % VOCABULARY
    return tokens[-6]


def configuration(
    num_speculative_tokens: int = 4, additional: dict[str, Any] | None = None, **speculative: Any
) -> Any:
    """What Proposer reads of a VllmConfig."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_speculative_tokens, **speculative
        ),
        model_config=SimpleNamespace(
            model="a model",
            max_model_len=CONTEXT,
            get_vocab_size=lambda: VOCABULARY,
            tokenizer="a model",
            tokenizer_revision=None,
            trust_remote_code=False,
        ),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        additional_config=additional or {},
    )


def drafting_with(drafter: str, **options: Any) -> dict[str, Any]:
    return {"outrider": {"drafter": drafter, "drafter_options": options}}


@dataclass
class Request:
    """One text on its way."""

    tokens: list[int]
    end: int  # length at which it is over
    unread: int = 0  # steps until its prompt is read
    draft: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)  # in this step


class Runner:
    """Steps a batch and asks proposers, all with the same call; they must answer alike."""

    def __init__(self, proposers: list[Any]) -> None:
        self.proposers = proposers
        self.rows: list[Request] = []
        self.away: list[Request] = []
        self.drafted = self.accepted = 0

    def join(self, tokens: list[int], length: int, unread: int = 0) -> Request:
        request = Request(list(tokens), min(len(tokens) + length, CONTEXT - 1), unread)
        self.rows.append(request)
        return request

    def step(self) -> list[list[int]]:
        """One pass, and the drafts for the next one, by row."""
        for request in self.rows:
            request.emitted = [] if request.unread else self._verified(request)
            request.unread = max(0, request.unread - 1)
            request.tokens += request.emitted
        drafts = self._ask()
        for request, draft in zip(self.rows, drafts, strict=True):
            request.draft = draft
        self.rows = [request for request in self.rows if len(request.tokens) < request.end]
        return drafts

    def shuffle(self, random: Random) -> None:
        random.shuffle(self.rows)

    def preempt(self, index: int) -> None:
        """The request leaves, with nothing but its tokens."""
        request = self.rows.pop(index)
        request.draft = []
        self.away.append(request)

    def resume(self) -> None:
        request = self.away.pop(0)
        request.unread = 1
        self.rows.append(request)

    def _verified(self, request: Request) -> list[int]:
        emitted: list[int] = []
        for token in [*request.draft, -1]:
            emitted.append(rule(request.tokens + emitted))
            if emitted[-1] != token or len(request.tokens) + len(emitted) >= CONTEXT:
                break
        self.drafted += len(request.draft)
        self.accepted += len(emitted) - 1
        return emitted

    def _ask(self) -> list[list[int]]:
        table = np.full(
            (len(self.rows) + 2, CONTEXT), 7, dtype=np.int32
        )  # what old requests left behind counts for nothing
        lengths = np.zeros(len(self.rows) + 2, dtype=np.int32)
        for index, request in enumerate(self.rows):
            table[index, : len(request.tokens)] = request.tokens
            lengths[index] = len(request.tokens)
        emitted = [list(request.emitted) for request in self.rows]
        answers = [
            proposer.propose(emitted, lengths, table, slot_mappings=None)
            for proposer in self.proposers
        ]
        assert all(answer == answers[0] for answer in answers), "ranks disagree"
        return answers[0]
