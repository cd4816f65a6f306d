"""What a block head knows of its rows: keys and values of the target's states, the newest of which still wait as they came.

A step ends with states of the tokens that stayed. They are not read at once: the next pass of the head takes them along
(`models/heads/block_pass.py`), so a step costs one pass, and one that drafts nothing costs none. Whatever else happens to
the rows, `settle` reads what waits first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.kv.cache import BLOCK, KVCache, LayerShape
from outrider.models.heads.block import BlockHead

MAX_WAITING = 64  # states of a row that wait at most, drafting or not


@dataclass(frozen=True)
class _Part:
    """States of one target pass."""

    hidden: list[Tensor]  # per target layer of the head (B, W, target H), each row's first
    counts: list[int]  # of each row
    ends: list[int]  # text index behind each row's last


class BlockContext:
    """Rows in the order of the batch. `kv` holds what is settled."""

    def __init__(self, head: BlockHead, dtype: torch.dtype, device: torch.device) -> None:
        config = head.config
        self._head = head
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        self.kv = KVCache([shape] * config.num_layers, dtype, device)
        self._parts: list[_Part] = []

    def add_row(self) -> None:
        self.settle()
        self.kv.add_row()

    def swap_remove(self, index: int) -> None:
        self.settle()
        self.kv.swap_remove(index)

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        """States (T, target H) of a chunk of a row's prompt that begins at text index `start`."""
        self.settle()
        states = [hidden[layer][None] for layer in self._head.config.target_layers]
        count = states[0].shape[1]
        self._read([index], _Part(states, [count], [start + count]))

    def commit(self, hidden: dict[int, Tensor], kept: list[list[int]], ends: list[int]) -> None:
        """The columns kept[b] of a pass's states (B, T, target H) belong to the text, which they end at index ends[b]."""
        states = [hidden[layer] for layer in self._head.config.target_layers]
        counts = [len(columns) for columns in kept]
        if any(columns != list(range(len(columns))) for columns in kept):  # a path through a tree
            width = max(counts)
            columns = torch.tensor([line + [0] * (width - len(line)) for line in kept], device=self.kv.device)
            rows = torch.arange(len(kept), device=self.kv.device)[:, None]
            states = [layer[rows, columns] for layer in states]
        self._parts.append(_Part(states, counts, ends))
        if max(map(sum, zip(*(part.counts for part in self._parts), strict=True))) >= MAX_WAITING:
            self.settle()

    @torch.inference_mode()
    def settle(self) -> None:
        """Read what waits."""
        if self._parts:
            part, self._parts = _joined(self._parts), []
            self._read(range(len(part.counts)), part)

    def next_pass(self, anchors: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, list[Tensor], int]:
        """What `block_pass` takes of rows with these pending tokens, at these text indices: its numbers, the states that wait,
        the number of keys. That pass must be made: afterwards they are part of the cache."""
        kv, size = self.kv, self._head.config.block_size
        if self._parts:
            part, self._parts = _joined(self._parts), []
            counts, hidden = part.counts, [states.contiguous() for states in part.hidden]
        else:
            counts, config = [0] * len(ends), self._head.config
            nothing = torch.zeros(len(ends), 1, config.target_hidden_size, dtype=kv.dtype, device=kv.device)
            hidden = [nothing] * len(config.target_layers)
        numbers = torch.tensor(list(zip(anchors, counts, kv.lengths, ends, strict=True)), device=kv.device)
        kv.reserve(kv.num_rows, max(kv.lengths) + hidden[0].shape[1] + size)
        for row, count in enumerate(counts):
            kv.advance(row, count)
        num_keys = min(-(-(max(kv.lengths) + size) // BLOCK) * BLOCK, kv.capacity)
        return numbers, hidden, num_keys

    def _read(self, rows: Sequence[int], part: _Part) -> None:
        """Commit the states of a part to the rows at these indices."""
        kv, counts, device = self.kv, part.counts, self.kv.device
        starts = torch.tensor([end - count for end, count in zip(part.ends, counts, strict=True)], device=device)
        positions = starts[:, None] + torch.arange(part.hidden[0].shape[1], device=device)
        known = positions.clamp(max=self._head.config.max_positions - 1)
        kv.reserve(kv.num_rows, max(kv.lengths[index] + count for index, count in zip(rows, counts, strict=True)))
        for layer, (keys, values) in enumerate(self._head.context_keys(self._head.context(part.hidden), known)):
            for place, (index, count) in enumerate(zip(rows, counts, strict=True)):
                end = slice(kv.lengths[index], kv.lengths[index] + count)
                kv.keys[layer][index, end] = keys[place, :, :count].transpose(0, 1)
                kv.values[layer][index, end] = values[place, :, :count].transpose(0, 1)
        for index, count in zip(rows, counts, strict=True):
            kv.advance(index, count)


def _joined(parts: list[_Part]) -> _Part:
    """Parts that follow one another in the texts, as one."""
    if len(parts) == 1:
        return parts[0]
    counts = [sum(line) for line in zip(*(part.counts for part in parts), strict=True)]
    hidden = []
    for layers in zip(*(part.hidden for part in parts), strict=True):
        lines = (
            torch.cat([states[row, : part.counts[row]] for states, part in zip(layers, parts, strict=True)])
            for row in range(len(counts))
        )
        hidden.append(pad_sequence(list(lines), batch_first=True))
    return _Part(hidden, counts, parts[-1].ends)
