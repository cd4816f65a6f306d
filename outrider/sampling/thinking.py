"""Thoughts of a model: the marks between which they stand, and a grammar that waits until they are
over.

A reasoning model thinks first and answers then. What a client asks about the answer (its form, its
stop strings) is not about the thoughts. Marks are followed by their tokens where each mark is
written in tokens of its own, else by their text (`thoughts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, MinLen
from torch import Tensor

from outrider.errors import ConfigError
from outrider.sampling.constraint import Constraint
from outrider.settings import checked

TokenId = Annotated[int, Ge(0)]
Marks = Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1)]
Phase = Literal["before", "thinking", "answer"]


@checked("thinking.")
@dataclass(frozen=True, kw_only=True)
class ThinkingMarks:
    """The marks that tell thoughts from the answer in one text. Raises ConfigError for marks that
    cannot be followed."""

    # texts that open them, at the beginning of the answer only (see `repeats`)
    opening: Marks
    closing: Marks  # texts that close them
    opening_id: TokenId | None = None  # the opening mark's token; needs `closing_ids`
    # the closing mark's tokens; empty: marks are found in the text
    closing_ids: tuple[TokenId, ...] = ()
    is_open: bool = False  # the prompt ends inside thoughts
    repeats: bool = False  # the opening mark's token opens them anywhere, any number of times
    # most tokens of thoughts: then the closing mark is the only token that may follow
    budget: Annotated[int, Ge(0)] | None = None

    def __post_init__(self) -> None:
        if self.opening_id is not None and not self.closing_ids:
            raise ConfigError(
                "thinking.opening_id needs closing_ids: both marks are followed by tokens, or "
                "neither"
            )
        if self.repeats and self.opening_id is None:
            raise ConfigError(
                "thinking.repeats needs opening_id: a text may hold the mark without meaning it"
            )
        if self.budget is not None and len(self.closing_ids) != 1:
            raise ConfigError(
                "thinking.budget needs a closing mark that is one token: it ends the thoughts "
                "with that token"
            )


@dataclass(frozen=True)
class ThinkingState:
    """The state of an answer by its tokens: before, inside or after its thoughts."""

    phase: Phase
    thought: int = 0  # tokens of thoughts, marks not counted
    closing: int = 0  # tokens of the closing mark that stand at the end

    @classmethod
    def beginning(cls, thinking: ThinkingMarks) -> ThinkingState:
        return cls("thinking" if thinking.is_open else "before")

    def after(self, token: int, thinking: ThinkingMarks, *, blank: bool = False) -> ThinkingState:
        """One token later. `blank`: it adds no more than white space, before which an opening mark
        may still come."""
        if self.phase != "thinking":
            opens = token == thinking.opening_id and (self.phase == "before" or thinking.repeats)
            is_same = not opens and (self.phase == "answer" or blank)
            return self if is_same else replace(self, phase="thinking" if opens else "answer")
        if token == thinking.closing_ids[self.closing]:
            done = self.closing + 1 == len(thinking.closing_ids)
            return (
                replace(self, phase="answer", closing=0)
                if done
                else replace(self, closing=self.closing + 1)
            )
        # the mark's tokens all differ: no other beginning can overlap
        again = int(token == thinking.closing_ids[0])
        return replace(self, thought=self.thought + self.closing + 1 - again, closing=again)


class BehindThoughts:
    """A `Constraint` that lets thoughts pass and holds the answer after them to the row's grammar,
    where it has one."""

    def __init__(self, vocab_size: int, thinking: ThinkingMarks, inner: Constraint | None) -> None:
        """Raises ConfigError for marks that are not tokens."""
        if not thinking.closing_ids:
            raise ConfigError(
                "thinking.closing_ids are needed where the answer has a form, or thoughts have a "
                "budget"
            )
        ids = [
            *thinking.closing_ids,
            *(() if thinking.opening_id is None else (thinking.opening_id,)),
        ]
        if max(ids) >= vocab_size:
            raise ConfigError(
                f"thinking names token id {max(ids)}, outside the vocabulary of {vocab_size}"
            )
        self._thinking = thinking
        self._inner = inner
        self._state = ThinkingState.beginning(thinking)
        self._free = torch.ones(vocab_size, dtype=torch.bool)
        self._close = torch.zeros(vocab_size, dtype=torch.bool)
        self._close[thinking.closing_ids[0]] = True

    @property
    def is_over(self) -> bool:
        return self._inner is not None and self._state.phase == "answer" and self._inner.is_over

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        states, answers = zip(*[self._follow(path) for path in paths], strict=True)
        masks = [self._mask(state) for state in states]
        held = [number for number, state in enumerate(states) if state.phase != "thinking"]
        if self._inner is not None and held:
            for number, mask in zip(
                held, self._inner.allowed([answers[number] for number in held]), strict=True
            ):
                masks[number] = (
                    self._or_thoughts(mask) if states[number].phase == "before" else mask
                )
        return torch.stack(masks)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        state, answer = self._follow(path)
        is_answer = self._inner is not None and state.phase == "answer"
        return self._inner.forced(answer, most) if is_answer and self._inner is not None else []

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = self._state
            self._state = self._after(self._state, token)
            if self._inner is not None and self._says(before, self._state):
                self._inner.commit([token])

    def _follow(self, path: Sequence[int]) -> tuple[ThinkingState, list[int]]:
        """(where a path leads, its tokens that belong to the answer)."""
        state = self._state
        answer = []
        for token in path:
            before = state
            state = self._after(state, token)
            if self._says(before, state):
                answer.append(token)
        return state, answer

    def _after(self, state: ThinkingState, token: int) -> ThinkingState:
        # a budget alone waits for an opening mark
        return state.after(token, self._thinking, blank=self._inner is None)

    def _says(self, before: ThinkingState, after: ThinkingState) -> bool:
        """Whether the token between two places is part of the answer: not where it closed the
        thoughts."""
        return after.phase == "answer" and before.phase != "thinking"

    def _mask(self, state: ThinkingState) -> Tensor:
        budget = self._thinking.budget
        is_spent = budget is not None and state.phase == "thinking" and state.thought >= budget
        return self._close if is_spent else self._free

    def _or_thoughts(self, mask: Tensor) -> Tensor:
        """At the beginning the model may think first, whatever form the answer has."""
        if self._thinking.opening_id is None:
            return mask
        mask = mask.clone()
        mask[self._thinking.opening_id] = True
        return mask
