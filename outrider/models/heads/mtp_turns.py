"""An MTP head of several layers on its cache: the first token of a draft is the first layer's, the second the second's.

Layer k stands at the same positions as the first and reads what layer k - 1 made of them, beside tokens that are k later:

    slot of a row's cache     0              1              ...   n - 2
    layer 0                   (x_1, h_0)     (x_2, h_1)           (x_{n-1}, h_{n-2})      -> x_n
    layer 1                   (x_2, o_0)     (x_3, o_1)           (x_n, o_{n-2})          -> x_{n+1}

So the last positions of all layers but the first hold guesses. They are never committed: the target's states of the last
`lag` positions are fed again with those that come after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.heads.head_lm import HeadLM
from outrider.models.heads.mtp import MtpHead
from outrider.models.pass_plan import PassPlan


class MtpTurnsLM(HeadLM):
    """A head whose layers take turns. Drafts are chains of at most one token a layer."""

    def __init__(self, head: MtpHead, vocab_size: int, context_length: int) -> None:
        super().__init__(head, vocab_size, context_length)
        self._layers, self._num_turns = head, len(head.layers)
        self.max_chain, self.lag = self._num_turns, self._num_turns - 1
        self._turn = 0  # the layer that makes the next pass
        self._line = torch.empty(0)  # (B, T) tokens of the last pass
        self._begun: list[int] = []  # lengths of the rows' caches before the first turn

    def give(self, features: Sequence[Tensor]) -> None:
        super().give(features)
        self._turn = 0

    def own_logits(self, tokens: Tensor, parents: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the positions given, then (B, 1, V) for one more token at a time."""
        assert parents is None, "its drafts are chains"
        if self._turn:
            return self._next(tokens)
        self._line, self._begun = tokens, list(self.kv.lengths)
        self._carried, logits = self._pass(tokens, self._features(tokens.shape[1], None), None, 0, self._all(tokens))
        self._turn = 1
        return logits

    def settle(self) -> None:
        """Run the layers whose turn did not come, so that all that is committed is in every layer's cache."""
        while 0 < self._turn < self._num_turns:
            self._next(self._line.new_zeros(len(self._line), 1))

    def feed(self, row: int, tokens: Sequence[int], features: Tensor) -> None:
        """Feed and commit positions of one row: the target's features (n, H) for them, tokens (n + lag,)."""
        count, carried = len(features), features[None]
        for turn in range(self._num_turns):
            self._turn = turn
            part = torch.tensor([list(tokens[turn : turn + count])], device=self.device)
            carried, _ = self._pass(part, carried, None, row, None)
        self._turn = 0
        self.kv.advance(row, count)

    def _next(self, tokens: Tensor) -> Tensor:
        """The next layer at the positions of the first, each row's last token being one of `tokens` (B, 1)."""
        assert self._carried is not None
        rows = torch.arange(len(tokens), device=self.device)
        last = torch.tensor([len(given) - 1 for given in self._given], device=self.device)
        self._line = F.pad(self._line[:, 1:], (0, 1))
        self._line[rows, last] = tokens[:, 0]
        lengths = list(self.kv.lengths)
        for row, begun in enumerate(self._begun):
            self.kv.truncate(row, begun)
        self._carried, logits = self._pass(self._line, self._carried, None, 0, self._all(self._line))
        for row, length in enumerate(lengths):
            self.kv.advance(row, length - self.kv.lengths[row])
        self._turn += 1
        return logits[rows, last][:, None]

    def _all(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1], device=self.device)

    def _states(self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan) -> Tensor:
        return self._layers.on_cache(tokens, features, positions, plan, self._turn)

    def _carry(self, states: Tensor) -> Tensor:
        return self._layers.carry(states, self._turn)

    def _logits(self, states: Tensor) -> Tensor:
        return self._layers.logits(states, self._turn)
