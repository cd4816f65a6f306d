"""An MTP head of several layers on transformers' own cache: turns as in `mtp_turns.py`, states as in `mtp_states.py`.

What a row keeps is a state for each layer, and only of positions that will be committed. The last `lag` positions of a pass,
which are fed again when their tokens are known, and all that is drafted behind them run on copies that nobody keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.models.heads.mtp import MtpHead
from outrider.models.heads.mtp_states import HeadStates, RowByRow
from outrider.models.heads.mtp_turns import MtpTurnsLM
from outrider.models.stateful.state import OwnState


@dataclass
class LayerStates:
    """States of a row, one a layer."""

    layers: list[OwnState] = field(default_factory=list)

    def copy(self) -> LayerStates:
        return LayerStates([state.copy() for state in self.layers])

    def mark(self) -> LayerStates:
        return LayerStates([state.mark() for state in self.layers])

    def back_to(self, mark: LayerStates) -> LayerStates:
        return LayerStates([state.back_to(there) for state, there in zip(self.layers, mark.layers, strict=True)])

    def first_broken_layer(self) -> int | None:
        return next((layer for layer, state in enumerate(self.layers) if state.first_broken_layer() is not None), None)


class TurnStates(HeadStates[LayerStates]):
    """States of rows whose lengths count drafted tokens, though no state has seen them."""

    def advance(self, row: int, count: int) -> None:
        self.lengths[row] += count


class MtpTurnsStatesLM(RowByRow, MtpTurnsLM):
    """A head whose layers take turns, on transformers' own cache."""

    kv: TurnStates

    def __init__(self, head: MtpHead, vocab_size: int, context_length: int) -> None:
        super().__init__(head, vocab_size, context_length, TurnStates.of(head))
        self._states_of: dict[int, LayerStates] = {}  # by row, of the passes of all turns

    def _pass(
        self, tokens: Tensor, features: Tensor, parents: Tensor | None, first_row: int, columns: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self._turn == 0:
            self._states_of.clear()  # rows of the turns before may have left
        return super()._pass(tokens, features, parents, first_row, columns)

    def _row(self, row: int, tokens: Tensor, features: Tensor, *, feeds: bool) -> Tensor:
        """States of this turn; the layer keeps those of positions that will be committed."""
        start, num_true = self.kv.lengths[row], len(tokens) if feeds else max(0, len(tokens) - self.lag)
        if self._turn == 0:
            made = self.kv.begin(row) or LayerStates([OwnState() for _ in self._layers.layers])
            self._states_of[row] = made
            self.kv.close(row, made if start + num_true else None, tokens[:num_true].tolist())
        state, parts = self._states_of[row].layers[self._turn], list[Tensor]()
        positions = torch.arange(start, start + len(tokens), device=self.device)
        for now in (slice(0, num_true), slice(num_true, len(tokens))):
            if len(tokens[now]):
                kept = state if now.start < num_true else state.copy()
                pairs = tokens[None, now], features[None, now], positions[None, now]
                parts.append(self._layers.states(*pairs, self._turn, kept))
        return torch.cat(parts, dim=1)
