"""An MTP head of one layer on transformers' own cache, for layers that keep more than keys and values: an indexer's keys, say.

A pass takes one row after another. A row goes back to two places: to where a proposal began, when nobody judged it, and to
behind the positions that the target's states stood beside, when it was judged. So these two states are kept, and nothing is ever
fed again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kv.states import State, StateCache
from outrider.models.heads.head_lm import HeadLM
from outrider.models.heads.mtp import MtpHead
from outrider.models.loading.memory import layer_kv_bytes
from outrider.models.stateful.state import OwnState

S = TypeVar("S", bound=State)


class HeadStates(StateCache[S]):
    """States of rows of a head, with snapshots of the two that a row goes back to."""

    @classmethod
    def of(cls, head: MtpHead) -> Self:
        """A cache for this head."""
        weight = next(head.parameters())
        bytes_per_token = sum(layer_kv_bytes(head.layer(index).body.config, head.dtype) for index in range(len(head.layers)))
        return cls([], head.dtype, weight.device, bytes_per_token)

    def begin(self, row: int) -> S | None:
        """The state of what is committed, which a pass is about to change. Older ones are forgotten."""
        assert not self.backlog(row), f"row {row} went back to a state that was not kept"
        self._rows[row].snapshots.clear()
        return self.open(row)

    def go_on(self, row: int) -> S | None:
        """The state behind the last pass, which the next one is about to change."""
        line = self._rows[row]
        return self.open(row) if len(line.snapshots) < 2 else line.state  # what is behind drafted tokens, nobody goes back to


class RowByRow(HeadLM, ABC):
    """A head whose passes take one row after another. Drafts are chains."""

    def _pass(
        self, tokens: Tensor, features: Tensor, parents: Tensor | None, first_row: int, columns: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert parents is None, "its drafts are chains"
        width, feeds = tokens.shape[1], columns is None
        counts = [width] if feeds else [min(width, len(given)) for given in self._given]
        parts = [
            self._row(first_row + line, tokens[line, :count], features[line, :count], feeds=feeds)
            for line, count in enumerate(counts)
        ]
        states = torch.cat([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in parts])
        return self._carry(states), states if columns is None else self._logits(states[:, columns])

    @abstractmethod
    def _row(self, row: int, tokens: Tensor, features: Tensor, *, feeds: bool) -> Tensor:
        """States (1, T, H) of one row's pairs behind what it holds. `feeds`: all of them will be committed."""


class MtpStatesLM(RowByRow):
    """A head on transformers' own cache."""

    kv: HeadStates[OwnState]

    def __init__(self, head: MtpHead, vocab_size: int, context_length: int) -> None:
        super().__init__(head, vocab_size, context_length, HeadStates[OwnState].of(head))
        self._own = head

    def _row(self, row: int, tokens: Tensor, features: Tensor, *, feeds: bool) -> Tensor:
        goes_on = not feeds and self._carried is not None
        state = (self.kv.go_on(row) if goes_on else self.kv.begin(row)) or OwnState()
        start = self.kv.reached(row)
        positions = torch.arange(start, start + len(tokens), device=self.device)[None]
        states = self._own.states(tokens[None], features[None], positions, state=state)
        self.kv.close(row, state, tokens.tolist())
        return states
