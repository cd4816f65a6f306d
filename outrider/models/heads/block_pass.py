"""A block head's passes over its cache.

A pass takes the target's states of the tokens that were committed since the last one, puts their
keys and values after what the cache holds, the block's own after these, and attends from the
block to all of them:

    slot of a row   [ cached ][ unread ][ block ][ padding of shorter rows ]

What was unread becomes context; the block and the padding are overwritten by the next pass.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.kv.cache import BLOCK, KVCache
from outrider.models.attention import attend
from outrider.models.heads.block import BlockHead
from outrider.models.pass_plan import PassPlan


class Unread(NamedTuple):
    """The target's states of tokens that the cache lacks, of several rows."""

    hidden: list[Tensor]  # per target layer of the head (B, W, target H), each row's first
    counts: list[int]  # of each row
    ends: list[int]  # text index after each row's last

    @property
    def width(self) -> int:
        return self.hidden[0].shape[1]

    def positions(self, last: int) -> Tensor:
        """(B, W), none beyond `last`; of padding, any."""
        starts = torch.tensor(
            [end - count for end, count in zip(self.ends, self.counts, strict=True)]
        )
        return (starts[:, None] + torch.arange(self.width)).clamp(min=0, max=last)


class Pending(NamedTuple):
    """The tokens that blocks begin with."""

    tokens: list[int]
    positions: list[int]  # text index of each


class Guessed(NamedTuple):
    """The result of a pass for the tokens after the pending ones."""

    states: Tensor  # (B, guesses, H)
    logits: Tensor  # (B, guesses, draft vocabulary), not yet corrected by the Markov head


class Corrected(NamedTuple):
    """A level's logits after each of M tokens of the level above."""

    logits: Tensor  # (B, M, draft vocabulary)
    # (B, M, rank): what a recurrent Markov head remembers of each token and those before it
    memory: Tensor | None


class BlockPasses(Protocol):
    """How a head's arithmetic is done. Caches have the room that a pass needs; what is put there is
    for the caller to commit."""

    def read(self, kv: KVCache, first_row: int, unread: Unread) -> None:
        """Put keys and values of these states after what the rows from `first_row` on hold."""

    def guess(self, kv: KVCache, pending: Pending, unread: Unread | None) -> Guessed:
        """One block after every row and what it has not read yet."""

    def corrected(
        self, logits: Tensor, states: Tensor, before: Tensor, memory: Tensor | None
    ) -> Corrected:
        """A level's logits (B, Vd), whose states are (B, H), after each of the tokens `before` (B,
        M).

        `memory` (B, M, rank): what is remembered of the tokens before those; None: there are none,
        or nothing is.
        """


class ModulePasses:
    """The head's own modules: the reference."""

    def __init__(self, head: BlockHead) -> None:
        self._head = head
        self._last = head.config.max_positions - 1

    def read(self, kv: KVCache, first_row: int, unread: Unread) -> None:
        """See `BlockPasses`."""
        for layer, (keys, values) in enumerate(self._context(unread, kv.device)):
            for row, count in enumerate(unread.counts):
                start = kv.lengths[first_row + row]
                indices = (first_row + row, slice(start, start + count))
                kv.keys[layer][indices] = keys[row, :, :count].transpose(0, 1)
                kv.values[layer][indices] = values[row, :, :count].transpose(0, 1)

    def guess(self, kv: KVCache, pending: Pending, unread: Unread | None) -> Guessed:
        """See `BlockPasses`."""
        head = self._head
        config = self._head.config
        device = kv.device
        counts = [0] * len(pending.tokens) if unread is None else unread.counts
        cached, count, ends = (
            torch.tensor(each, device=device) for each in (kv.lengths, counts, pending.positions)
        )
        block = torch.arange(config.block_size, device=device)
        context = [] if unread is None else self._context(unread, device)
        offsets = count[:, None] + block
        if unread is not None:
            waiting = torch.arange(unread.width, device=device)
            # padding goes after the block
            moved = torch.where(waiting < count[:, None], waiting, waiting + config.block_size)
            offsets = torch.cat([moved, offsets], dim=1)
        slots = torch.arange(len(counts), device=device) * kv.capacity
        longest = (
            max(length + more for length, more in zip(kv.lengths, counts, strict=True))
            + config.block_size
        )
        num_keys = min(-(-longest // BLOCK) * BLOCK, kv.capacity)
        indices = ((slots + cached)[:, None] + offsets).flatten()
        ends = cached + count
        plans = {
            sight: PassPlan(
                kv.keys, kv.values, indices, partial(config.mask, sight, ends, num_keys, kv.dtype)
            )
            for sight in set(map(config.sight, range(config.num_layers)))
        }

        def attention(layer: int, queries: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
            if context:
                own_keys, own_values = (
                    torch.cat(pair, dim=2)
                    for pair in zip(context[layer], (own_keys, own_values), strict=True)
                )
            return attend(
                plans[config.sight(layer)], layer, queries, own_keys, own_values
            ).transpose(1, 2)

        fed = head.block_tokens(torch.tensor(pending.tokens, device=device))
        states = head.guessing(head(fed, (ends[:, None] + block).clamp(max=self._last), attention))
        return Guessed(states, head.logits(states))

    def corrected(
        self, logits: Tensor, states: Tensor, before: Tensor, memory: Tensor | None
    ) -> Corrected:
        """See `BlockPasses`."""
        return corrected_by(self._head, logits, states, before, memory)

    def _context(self, unread: Unread, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        positions = unread.positions(self._last).to(device)
        return self._head.context_keys(self._head.context(unread.hidden), positions)


def corrected_by(
    head: BlockHead, logits: Tensor, states: Tensor, before: Tensor, memory: Tensor | None
) -> Corrected:
    """`BlockPasses.corrected` by a head's own modules."""
    base, wide_states = (
        tensor[:, None].expand(-1, before.shape[1], -1) for tensor in (logits, states)
    )
    return Corrected(*head.remembering(base, wide_states, before, memory))
