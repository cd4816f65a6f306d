"""A head that is fed the target's hidden states, on a cache of its own: drafters of chains and
trees run it as they run an LM.

To them it is a language model over a text without its first token: token x_{t+1} stands at position
t, alongside feature g_t. Positions whose feature the target gave (`give`) may be committed; after
them a token takes the state of the token it follows, from the pass before. So a pass must follow
another one on the same rows, with nothing in between but commits of what that pass fed:

    give(features)             per row, of the positions that its cache lacks; the target's
    forward(those tokens)      states of every position; commit them (`kv.advance`): they are true
    forward(one more token)    reads the last state of each row, and so on (a chain); or
    forward(those + nodes, parents)   the same positions again and tree nodes, each reading its parent's state of the pass before

Positions count from the beginning of the cache: rotary embeddings see only differences, so a row
may begin anywhere in its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kv import KVCache, LayerShape
from outrider.models.lm import PassOutput
from outrider.models.pass_plan import PassPlan
from outrider.models.plan import plan_pass


@dataclass(frozen=True)
class HeadShape:
    """The part of `LM.shape` that drafters ask for."""

    vocab_size: int
    context_length: int
    sliding_window: int | None = None


class FedConfig(Protocol):
    """The part of a head's config that drafters ask for."""

    @property
    def signals(self) -> tuple[int, ...]:
        """The target's hidden states that make a feature, by the keys of `models/signals.py`."""

    @property
    def feature_size(self) -> int:
        """Width of the hidden states that a feature is made of, side by side."""

    @property
    def hidden_size(self) -> int:
        """Width of features and states."""

    @property
    def max_position_embeddings(self) -> int | None:
        """The longest text that the head knows; None: as long as its target's."""


class FedHead(Protocol):
    """A head that continues what the target thinks, one token at a time: an EAGLE head, or an MTP
    head of one layer."""

    # (Vd,) int64: the target's id of every token the head knows; None: all
    draft_ids: Tensor | None

    @property
    def config(self) -> FedConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """The shape of a token's cache entry, for each layer."""

    @property
    def window(self) -> int | None:
        """Tokens that its attention sees back; None: all."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def join(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The target's hidden states that make a feature, side by side: (..., F)."""

    def fuse(self, joined: Tensor) -> Tensor:
        """Features (..., H) of what `join` gives."""

    def on_cache(
        self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan
    ) -> Tensor:
        """States (B, T, H) of the pairs (tokens (B, T), features (B, T, H)) at positions (B, T)."""

    def carry(self, states: Tensor) -> Tensor:
        """The features of the pairs that follow, as far as the head can tell."""

    def logits(self, states: Tensor) -> Tensor:
        """(..., H) -> (..., Vd)."""

    def in_full(self, logits: Tensor) -> Tensor:
        """(..., Vd) -> (..., V), over the target's vocabulary."""


class HeadRun(Protocol):
    """A head's arithmetic in another way than its module's."""

    def fuse(self, joined: Tensor) -> Tensor:
        """Features (N, H) of the target's hidden states (N, F)."""

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The features for the pairs that follow (B, T, H), and logits (B, K, Vd) of these
        columns."""


class HeadLM:
    """A head as a language model on a cache of its own. `run`: instead of the module's own passes."""

    max_chain: int | None = None  # tokens of the longest chain
    lag = 0  # positions that are fed again, with `lag` more tokens after them

    def __init__(
        self, head: FedHead, vocab_size: int, context_length: int, window: int | None = None
    ) -> None:
        """`context_length`: the target's; the head may know less.

        `window`: positions that each layer sees back at most. With it the head drafts in texts longer
        than it knows, too, and its cache keeps no more."""
        self.head = head
        self.device = next(parameter.device for parameter in head.parameters())
        self.dtype = head.dtype
        known = head.config.max_position_embeddings
        layers = head.layer_shapes
        self.window = window
        self.shape = HeadShape(
            vocab_size, min(known or context_length, context_length), head.window
        )
        if window is not None:
            layers = [shape.within(window) for shape in layers]
            self.shape = HeadShape(vocab_size, context_length, min(head.window or window, window))
        self.kv = KVCache(layers, head.dtype, self.device)
        self._given: list[Tensor] = []  # per row (k, H)
        self.run: HeadRun | None = None
        # (1, H): what pairs without a feature are given, of a head with a mask token
        self.mask_feature: Tensor | None = None
        # (B, T, H) of the last pass: what the pairs that follow are given
        self._carried: Tensor | None = None

    def give(self, features: Sequence[Tensor]) -> None:
        """The features (k, H) of each row's next positions; k >= 1."""
        self._given = list(features)
        self._carried = None

    @property
    def given(self) -> list[Tensor]:
        """The features last given: per row (k, H)."""
        return self._given

    def settle(self) -> None:
        """The proposal is over: what it left to do for the positions that will be committed."""

    def fused(self, joined: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The features (k, H) of the target's hidden states (k, F) side by side (`FedHead.join`),
        of several rows in one go."""
        sizes = [len(part) for part in joined]
        if self.run is not None and len(joined) == 1:
            return (self.run.fuse(joined[0]),)
        if self.run is not None:
            return self.run.fuse(torch.cat(list(joined))).split(sizes)
        # a single position takes other kernels
        table = F.pad(torch.cat(list(joined)), (0, 0, 0, max(0, 2 - sum(sizes))))
        return self.head.fuse(table)[: sum(sizes)].split(sizes)

    def forward(
        self, tokens: Tensor, parents: Tensor | None = None, columns: Tensor | None = None
    ) -> PassOutput:
        """Logits (B, T, V), or (B, K, V) for the K given `columns`, over the target's vocabulary.

        They are very low where the head knows no such token. `tokens` (B, T), `parents` (B, T-1) as
        in `LM.forward`.
        """
        return PassOutput(self.head.in_full(self.own_logits(tokens, parents, columns)))

    def own_logits(
        self, tokens: Tensor, parents: Tensor | None = None, columns: Tensor | None = None
    ) -> Tensor:
        """The logits of `forward` over the head's own vocabulary, (B, T or K, Vd)."""
        features = (
            self._carried if self._goes_on(parents) else self._features(tokens.shape[1], parents)
        )
        assert features is not None
        columns = torch.arange(tokens.shape[1], device=self.device) if columns is None else columns
        carried, logits = self._pass(tokens, features, parents, 0, columns)
        # the chain continues after the last given position of each row
        if parents is None and self._carried is None:
            last = torch.tensor([len(given) - 1 for given in self._given], device=self.device)
            carried = carried[torch.arange(len(carried), device=self.device), last][:, None]
        self._carried = carried
        return logits

    def feed(self, row: int, tokens: Sequence[int], features: Tensor) -> None:
        """Feed and commit positions of one row: tokens and the target's features (n, H) for them."""
        self._pass(
            torch.tensor([list(tokens)], device=self.device), features[None], None, row, None
        )
        self.kv.advance(row, len(tokens))

    def _goes_on(self, parents: Tensor | None) -> bool:
        return parents is None and self._carried is not None

    def _features(self, width: int, parents: Tensor | None) -> Tensor:
        """(B, width, H): those given, then of every node the carried state of its parent."""
        like = self._given[0]
        features = like.new_zeros(len(self._given), width, like.shape[1])
        if self.mask_feature is not None:
            features = features + self.mask_feature
        if self._carried is not None and parents is not None:
            # beyond: padding
            columns = F.pad(parents + 1, (1, 0)).clamp(max=self._carried.shape[1] - 1)
            rows = torch.arange(len(columns), device=self.device)[:, None]
            features = self._carried[rows, columns]
        for row, given in enumerate(self._given):
            features[row, : len(given)] = given
        return features

    def _pass(
        self,
        tokens: Tensor,
        features: Tensor,
        parents: Tensor | None,
        first_row: int,
        columns: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The carried features (B, T, H) and the logits (B, K, Vd) of these columns.

        The pass comes after the tokens that rows from first_row on hold.

        Without columns nobody reads the logits.
        """
        num_rows, num_tokens = tokens.shape
        # a single row takes other kernels
        width = num_tokens if num_rows * num_tokens > 1 or self.run is not None else 2
        tokens = F.pad(tokens, (0, width - num_tokens))
        features = F.pad(features, (0, 0, 0, width - num_tokens))
        if parents is not None:
            parents = F.pad(parents, (0, width - num_tokens), value=-1)
        self.kv.reserve(
            self.kv.num_rows, max(self.kv.lengths[first_row : first_row + num_rows]) + width
        )
        plan, positions = plan_pass(
            self.kv,
            num_rows,
            width,
            parents,
            first_row,
            window=self.shape.sliding_window,
            every_layer=self.window is not None,
            last_position=self.shape.context_length - 1,
        )
        if self.run is not None:
            nobody = torch.empty(0, dtype=torch.int64)
            return self.run(
                tokens, features, positions, plan, nobody if columns is None else columns
            )
        states = self._states(tokens, features, positions, plan)[:, :num_tokens]
        return self._carry(states), states if columns is None else self._logits(states[:, columns])

    def _states(
        self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan
    ) -> Tensor:
        return self.head.on_cache(tokens, features, positions, plan)

    def _carry(self, states: Tensor) -> Tensor:
        return self.head.carry(states)

    def _logits(self, states: Tensor) -> Tensor:
        return self.head.logits(states)
