"""The plan of one pass: the slots of the cache that it writes, and what each of its tokens may see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outrider.kv.state_slots import StatePass

QUERY_BLOCK = 8  # queries are padded to a multiple of it (attention.py)


@dataclass(frozen=True)
class ShortSlots:
    """The places of a pass in layers with windows, whose slots begin at a base of each row
    (`kv/cache.py`)."""

    # (B*T,) int64: slot * capacity of these layers + position - base of every new token
    indices: Tensor
    bases: Tensor  # (B,) int64


@dataclass(frozen=True)
class PassPlan:
    """The slots that a pass writes and what it may see. Masks are made when attention asks for
    them; the native runtime needs none."""

    keys: list[Tensor]  # per layer (slots, capacity, KV heads, key size)
    # per layer (slots, capacity, KV heads, value size); of size 0: values are the beginnings of
    # keys
    values: list[Tensor]
    indices: Tensor  # (B*T,) int64: slot * capacity + position of every new token
    make_mask: Callable[[], Tensor]
    # None when the model has no layers with windows
    make_window_mask: Callable[[], Tensor] | None = None
    # (B, T, T) bool, which tokens each token of a tree sees; None for chains
    sees: np.ndarray | None = None
    # S of a pass of chains alone, in which indices say who sees what; None: the mask says it
    chain_keys: int | None = None
    states: StatePass | None = None  # running states, of a model that has them
    parents: Tensor | None = None  # (B, T-1) as in `Draft`, of a tree over running states
    short: ShortSlots | None = None  # of layers with windows; None where they lie as the others do
    # (B,) positions in front of the pass, which the native runtime asks for
    starts: Sequence[int] | None = None

    @cached_property
    def mask(self) -> Tensor:
        """(B, 1, T padded to QUERY_BLOCK, S) additive, S a multiple of the cache block."""
        return self.make_mask()

    @cached_property
    def window_mask(self) -> Tensor | None:
        """The mask of layers with windows, over the keys of their slots; None when the model has
        none."""
        return None if self.make_window_mask is None else self.make_window_mask()

    @cached_property
    def distances(self) -> Tensor:
        """(B, 1, T padded, S) fp32: each key's position less that of the query, as both stand on
        the query's own path."""
        # as many keys are seen as stand before it, and itself
        positions = (self.mask == 0).sum(-1)[:, 0] - 1
        num_rows = len(self.mask)
        num_keys = self.mask.shape[3]
        indices = self.indices.view(num_rows, -1) % self.keys[0].shape[1]
        keys = torch.arange(num_keys, device=indices.device).repeat(num_rows, 1)
        keys.scatter_(1, indices, positions[:, : indices.shape[1]])
        return (keys[:, None] - positions[:, :, None])[:, None].float()


_followed: ContextVar[PassPlan] = ContextVar("the plan of the pass that this thread makes")


@contextmanager
def following(plan: PassPlan) -> Iterator[None]:
    """Attention of modules that this thread calls inside follows the plan, whichever arguments
    their code hands on."""
    before = _followed.set(plan)
    try:
        yield
    finally:
        _followed.reset(before)


def followed() -> PassPlan:
    """The plan of the pass that this thread makes."""
    return _followed.get()
