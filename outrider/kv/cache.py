"""Keys and values of every layer, for a batch of rows of different lengths.

One pair of tensors per layer, (slots, capacity, KV heads, head size). Row b of the batch lives in slot b; its first
`lengths[b]` positions are committed, everything behind them is scratch that the next pass overwrites:

    slot b   [ committed: 0 .. lengths[b] )[ the pass being scored: pending token, draft nodes )[ unused .. capacity )

So forgetting a rejected draft is free, and keeping a chain is an addition; only a tree's kept path is moved. Rows leave
by swap-remove: the last row moves into the hole, exactly as in every other per-row state (`Rows`, drafters), so that
indices agree everywhere. Capacity grows by doubling in multiples of `BLOCK`, the key block of the attention kernel: with
whole blocks only, a query's arithmetic does not depend on how much room lies behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from outrider.huge_pages import CHUNK, zeros_on_huge_pages

BLOCK = 512  # positions; torch's CPU flash attention walks the keys in blocks of this size


@dataclass(frozen=True)
class LayerShape:
    """Head layout of one layer, as seen on its first pass."""

    num_kv_heads: int
    key_size: int
    value_size: int
    values_in_keys: bool = False  # the first numbers of a key are its value, which is not stored beside it

    @property
    def stored_value_size(self) -> int:
        """Numbers of a value that lie beside the key."""
        return 0 if self.values_in_keys else self.value_size


class KVCache:
    """Keys and values of every layer for a batch of rows.

    Lengths are host integers: the decode loop is driven by the host anyway.
    """

    by_position = True  # what a token left can be read, put and left out by itself; not so in `states.py`

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device | str) -> None:
        self.layers = list(layers)
        self.dtype = dtype
        self.device = torch.device(device)
        self.lengths: list[int] = []  # committed positions per row
        self.keys: list[Tensor] = []  # per layer (slots, capacity, num_kv_heads, key_size)
        self.values: list[Tensor] = []  # per layer (slots, capacity, num_kv_heads, stored_value_size)
        self._allocate(num_slots=1, capacity=BLOCK)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        """Positions per slot."""
        return self.keys[0].shape[1]

    @property
    def bytes_per_token(self) -> int:
        per_position = sum(s.num_kv_heads * (s.key_size + s.stored_value_size) for s in self.layers)
        return per_position * self.dtype.itemsize

    @property
    def allocated_bytes(self) -> int:
        return self.bytes_per_token * self.num_slots * self.capacity

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for this many rows and positions; contents are preserved. Costs a copy only when it has to grow."""
        slots, capacity = self.size_for(num_rows, num_tokens)
        if (slots, capacity) != (self.num_slots, self.capacity):
            self._allocate(slots, capacity)

    def size_for(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """(slots, positions per slot) that `reserve` would leave."""
        slots, capacity = self.num_slots, self.capacity
        while slots < num_rows:
            slots *= 2
        if num_tokens > capacity:
            capacity = max(_round_up(num_tokens, BLOCK), min(2 * capacity, capacity + 8 * BLOCK))
        return slots, capacity

    def shrink(self, num_slots: int, capacity: int) -> None:
        """Give memory back, down to this size. Raises ValueError when rows or positions in use would be lost."""
        if num_slots < max(self.num_rows, 1) or capacity < max([BLOCK, *self.lengths]) or capacity % BLOCK:
            raise ValueError(f"{self.num_rows} rows, lengths {self.lengths}, do not fit into {num_slots} x {capacity} positions")
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                stores[layer] = store[:num_slots, :capacity].clone()

    def add_row(self) -> int:
        """A new empty row at the end of the batch; returns its index."""
        self.reserve(self.num_rows + 1, 0)
        self.lengths.append(0)
        return self.num_rows - 1

    def swap_remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        last = self.num_rows - 1
        if row != last:
            length = self.lengths[last]
            for store in (*self.keys, *self.values):
                store[row, :length] = store[last, :length]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def advance(self, row: int, count: int) -> None:
        """Commit the next `count` positions of a row, as the last pass wrote them."""
        self.lengths[row] += count

    def truncate(self, row: int, length: int) -> None:
        """Forget everything from position `length` on."""
        self.lengths[row] = min(self.lengths[row], length)

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Commit nodes of the pass just scored, given by their offsets in it (0 = the pending token), in path order.

        Offsets must increase, so a node never moves onto one that is still to be read.
        """
        start = self.lengths[row]
        first = next((number for number, offset in enumerate(path) if number != offset), None)  # before it no node moves
        if first is not None and self.device.type == "cpu":
            self._move(row, start, first, path)
        elif first is not None:
            source = torch.tensor([start + offset for offset in path[first:]], device=self.device)
            for store in (*self.keys, *self.values):
                line = store[row]
                line[start + first : start + len(path)] = line.index_select(0, source)  # copies first: overlap is safe
        self.lengths[row] += len(path)

    def _move(self, row: int, start: int, first: int, path: Sequence[int]) -> None:
        """`keep` from node `first` of the path on, by moving memory: torch took half a millisecond for thirty layers."""
        runs: list[list[int]] = []  # to, from, positions: what follows one another goes together
        for number, offset in enumerate(path[first:], first):
            if runs and offset == runs[-1][1] + runs[-1][2]:
                runs[-1][2] += 1
            else:
                runs.append([number, offset, 1])
        for store in (store for store in (*self.keys, *self.values) if store.numel()):
            size = store.stride(1) * store.itemsize
            begin = store.data_ptr() + store.stride(0) * store.itemsize * row + start * size
            for to, origin, count in runs:
                ctypes.memmove(begin + to * size, begin + origin * size, count * size)

    def read(self, row: int, start: int, end: int) -> list[Tensor]:
        """Copies (end - start, KV heads, size) of committed positions: keys of every layer, then values."""
        return [store[row, start:end].clone() for store in (*self.keys, *self.values)]

    @torch.inference_mode()
    def put(self, row: int, start: int, parts: Sequence[Tensor]) -> None:
        """Commit positions start .. start + n of a row that holds `start`, as `read` gave them elsewhere."""
        assert self.lengths[row] == start, f"row {row} holds {self.lengths[row]} positions, not {start}"
        count = parts[0].shape[0]
        self.reserve(self.num_rows, start + count)
        for store, part in zip((*self.keys, *self.values), parts, strict=True):
            store[row, start : start + count] = part
        self.lengths[row] = start + count

    def pack(self, row: int) -> Any:
        """All that a row holds, for `unpack` elsewhere; it stays here, too."""
        return self.read(row, 0, self.lengths[row])

    def unpack(self, row: int, packed: Any) -> None:
        """An empty row becomes what `pack` made elsewhere, which may be unpacked again."""
        self.put(row, 0, packed)

    def clear(self) -> None:
        """No rows, and nothing of them in memory that passes read."""
        self.lengths.clear()
        self.scrub()

    def scrub(self) -> None:
        """Zero everything that is not committed. After a pass that made NaN: a masked position still enters products."""
        for store in (*self.keys, *self.values):
            store[self.num_rows :] = 0
            for row, length in enumerate(self.lengths):
                store[row, length:] = 0

    def first_broken_layer(self) -> int | None:
        """The first layer with a NaN or infinite key or value anywhere; None when all are finite. For error messages."""
        for layer, stores in enumerate(zip(self.keys, self.values, strict=True)):
            if not all(torch.isfinite(store).all() for store in stores):
                return layer
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping contradicts itself. For tests and idle moments."""
        assert self.num_rows <= self.num_slots, f"{self.num_rows} rows in {self.num_slots} slots"
        assert self.capacity % BLOCK == 0, f"capacity {self.capacity} is no multiple of {BLOCK}"
        for row, length in enumerate(self.lengths):
            assert 0 <= length <= self.capacity, f"row {row}: length {length} outside [0, {self.capacity}]"
        for shape, key, value in zip(self.layers, self.keys, self.values, strict=True):
            expected = (self.num_slots, self.capacity, shape.num_kv_heads)
            assert key.shape == (*expected, shape.key_size), f"keys are {tuple(key.shape)}"
            assert value.shape == (*expected, shape.stored_value_size), f"values are {tuple(value.shape)}"

    @torch.inference_mode(False)  # ordinary tensors, wherever growth happens: rows also leave outside inference mode
    def _allocate(self, num_slots: int, capacity: int) -> None:
        # Zeros, not empty: masked positions still enter a product with weight 0, and 0 * NaN would be NaN.
        heads = [shape.num_kv_heads for shape in self.layers] * 2
        sizes = [*(shape.key_size for shape in self.layers), *(shape.stored_value_size for shape in self.layers)]
        shapes = [(num_slots, capacity, count, size) for count, size in zip(heads, sizes, strict=True)]
        old, stores = [*self.keys, *self.values], list[Tensor]()
        self.keys, self.values = [], []
        while len(stores) < len(shapes):  # a few at a time, so that old memory is given back as new memory is taken
            few = self._few(shapes[len(stores) :])
            on_cpu = self.device.type == "cpu"
            made = zeros_on_huge_pages(few, self.dtype) if on_cpu else [torch.zeros(few[0], dtype=self.dtype, device=self.device)]
            for store in made:
                if old:
                    before = old.pop(0)
                    store[: before.shape[0], : before.shape[1]] = before
            stores += made
        self.keys, self.values = stores[: len(self.layers)], stores[len(self.layers) :]

    def _few(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
        """The first of these shapes, and on a CPU those behind it that share a block of huge pages."""
        if self.device.type != "cpu":
            return shapes[:1]
        ends = accumulate(prod(shape) * self.dtype.itemsize for shape in shapes)
        return shapes[: 1 + sum(end < CHUNK for end in ends)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
