"""Keys and values of every layer, for a batch of rows of different lengths.

One pair of tensors per layer, (slots, capacity, KV heads, head size). Row b of the batch lives in
slot b; its first `lengths[b]` positions are committed, everything after them is scratch that the
next pass overwrites:

    slot b   [ committed: 0 .. lengths[b] )[ the pass being scored: pending token, draft nodes )[ unused .. capacity )

So forgetting a rejected draft is free, and keeping a chain is an addition; only a tree's kept path
is moved. Rows leave by swap-remove: the last row moves into the hole, exactly as in every other
per-row state (`Rows`, drafters), so that indices agree everywhere. Capacity grows by doubling in
multiples of `BLOCK`, the key block of the attention kernel: with whole blocks only, a query's
arithmetic does not depend on how much room lies after it.

Layers with a window read the last positions alone. Their slots are short and hold a row from its
base on, a whole block:

    slot b   [ bases[b] .. firsts[b] )[ held: firsts[b] .. lengths[b] )[ the pass being scored )[ unused )

A row whose next pass would not fit moves to the front of its slot (`make_room`). It holds
`KEPT_BACK` tokens more than windows reach, so that many may be taken back; a row that is cut
further is forgotten, and its tokens must be fed again.

A prompt that was read sparsely (`outrider/prefill.py`) lies here without its gaps: keys carry the
positions that they were made for, so only what comes next must know how many were `skipped`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from outrider.huge_pages import CHUNK, zeros_on_huge_pages

BLOCK = 512  # positions; torch's CPU flash attention walks the keys in blocks of this size
# positions after the committed ones that a short slot always has: a chunk of a prompt
CHUNK_ROOM = 256
KEPT_BACK = 64  # committed tokens that can be taken back where windows have passed on


@dataclass(frozen=True)
class PackedRow:
    """A row outside its cache: keys and values of `length` tokens, in layers with windows those
    from `first` on."""

    length: int
    first: int
    parts: list[Tensor]
    skipped: int = 0


@dataclass(frozen=True)
class LayerShape:
    """Head layout of one layer, as seen on its first pass."""

    num_kv_heads: int
    key_size: int
    value_size: int
    # the first numbers of a key are its value, which is not stored next to it
    values_in_keys: bool = False
    window: int | None = None  # positions that a token sees, its own included; None: all
    # it holds the keys of an indexer, to which no layer attends (`models/indexer.py`)
    is_indexer: bool = False

    def within(self, window: int) -> LayerShape:
        """The shape where a token sees the last `window` positions at most."""
        return replace(self, window=min(self.window or window, window))

    @property
    def stored_value_size(self) -> int:
        """Numbers of a value that lie next to the key."""
        return 0 if self.values_in_keys else self.value_size


class KVCache:
    """Keys and values of every layer for a batch of rows.

    Lengths are host integers: the decode loop is driven by the host anyway.
    """

    # what a token left can be read, put and left out by itself; not so in `states.py`
    by_position = True
    window: int | None = None  # the widest of all layers; None where no layer has one
    _layer_bytes = _window_bytes = 0  # of a token in all layers, and in those with windows

    def __init__(
        self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.layers = list(layers)
        self.dtype = dtype
        self.device = torch.device(device)
        self.window = max(
            (shape.window for shape in self.layers if shape.window is not None), default=None
        )
        self._layer_bytes = self._bytes_of(self.layers)
        self._window_bytes = self._bytes_of(
            [shape for shape in self.layers if shape.window is not None]
        )
        self.lengths: list[int] = []  # committed positions per row
        self.skipped: list[int] = []  # and tokens of its text before them that nobody read
        # per row the position that comes first in slots of layers with windows
        self.bases: list[int] = []
        self.firsts: list[int] = []  # and the first one that they hold
        self.keys: list[Tensor] = []  # per layer (slots, capacity, num_kv_heads, key_size)
        # per layer (slots, capacity, num_kv_heads, stored_value_size)
        self.values: list[Tensor] = []
        self._capacity = self._window_capacity = 0
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
        return self._capacity

    @property
    def window_capacity(self) -> int:
        """Positions per slot in layers with windows."""
        return self._window_capacity

    @property
    def is_short(self) -> bool:
        """Whether layers with windows lie otherwise than the others."""
        return self.window is not None and (
            self.window_capacity != self.capacity or any(self.bases)
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that every layer holds."""
        return self._layer_bytes

    @property
    def allocated_bytes(self) -> int:
        return self.num_slots * self.slot_bytes(self.capacity)

    def slot_bytes(self, capacity: int) -> int:
        """Bytes of a slot of this capacity."""
        return self.bytes_per_token * capacity - self.saved_bytes(capacity)

    def saved_bytes(self, capacity: int) -> int:
        """Bytes that windows save of such a slot."""
        return (
            self._window_bytes * max(0, capacity - self._window_room(capacity))
            if self._window_bytes
            else 0
        )

    def _bytes_of(self, layers: Sequence[LayerShape]) -> int:
        return (
            sum(s.num_kv_heads * (s.key_size + s.stored_value_size) for s in layers)
            * self.dtype.itemsize
        )

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for this many rows and positions; contents are preserved. Costs a copy only
        when it has to grow."""
        slots, capacity = self.size_for(num_rows, num_tokens)
        if (slots, capacity) != (self.num_slots, self.capacity):
            self._allocate(slots, capacity)

    def size_for(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """(slots, positions per slot) that `reserve` would leave."""
        slots = self.num_slots
        capacity = self.capacity
        while slots < num_rows:
            slots *= 2
        if num_tokens > capacity:
            capacity = max(_round_up(num_tokens, BLOCK), min(2 * capacity, capacity + 8 * BLOCK))
        return slots, capacity

    def shrink(self, num_slots: int, capacity: int) -> None:
        """Give memory back, down to this size. Raises ValueError when rows or positions in use
        would be lost."""
        if (
            num_slots < max(self.num_rows, 1)
            or capacity < max([BLOCK, *self.lengths])
            or capacity % BLOCK
        ):
            raise ValueError(
                f"{self.num_rows} rows, lengths {self.lengths}, do not fit into {num_slots} x "
                f"{capacity} positions"
            )
        self._capacity, self._window_capacity = capacity, min(self._window_capacity, capacity)
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                stores[layer] = store[:num_slots, : self._capacity_of(layer)].clone()

    def make_room(self, first_row: int, num_rows: int, width: int) -> None:
        """Before a pass of `width` tokens over these rows: room for them in layers with windows."""
        lengths = self.lengths[first_row : first_row + num_rows]
        self.slide(first_row, lengths, lengths, width)

    def slide(
        self, first_row: int, committed: Sequence[int], lengths: Sequence[int], width: int
    ) -> None:
        """Forget what windows no longer reach from what is `committed`, where a pass after
        `lengths` needs the room."""
        if self.window is None:
            return
        for row, (num_committed, length) in enumerate(
            zip(committed, lengths, strict=True), first_row
        ):
            before = self.bases[row]
            if length + width - before <= self.window_capacity:
                continue
            base = max(before, (num_committed - self.window - KEPT_BACK) // BLOCK * BLOCK)
            held = max(0, length - base)
            for store in self._windowed_stores() if held and base > before else ():
                store[row, :held] = store[row, base - before : length - before].clone()
            self._set_base(row, base, max(base, self.firsts[row]))
            if length + width - base > self.window_capacity:
                self._allocate(
                    self.num_slots, self.capacity, _round_up(length + width - base, BLOCK)
                )

    def _set_base(self, row: int, base: int, first: int) -> None:
        self.bases[row], self.firsts[row] = base, first

    def add_row(self) -> int:
        """A new empty row at the end of the batch; returns its index."""
        self.reserve(self.num_rows + 1, 0)
        for each in (self.lengths, self.skipped, self.bases, self.firsts):
            each.append(0)
        return self.num_rows - 1

    def swap_remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        last = self.num_rows - 1
        if row != last:
            for store, begin in zip((*self.keys, *self.values), self.begins(last), strict=True):
                store[row, : self.lengths[last] - begin] = store[last, : self.lengths[last] - begin]
            self.lengths[row] = self.lengths[last]
            self.skipped[row] = self.skipped[last]
            self._set_base(row, self.bases[last], self.firsts[last])
        for each in (self.lengths, self.skipped, self.bases, self.firsts):
            each.pop()

    def text_length(self, row: int) -> int:
        """Tokens of a row's text that its next pass comes after."""
        return self.lengths[row] + self.skipped[row]

    def advance(self, row: int, count: int) -> None:
        """Commit the next `count` positions of a row, as the last pass wrote them."""
        self.lengths[row] += count

    def truncate(self, row: int, length: int) -> None:
        """Forget everything from position `length` on, and more where a window before it is gone:
        the caller then feeds what the cache lacks."""
        if (
            length < self.lengths[row]
            and self.window is not None
            and 0 < self.firsts[row] > length - self.window
        ):
            length = 0
        self.lengths[row] = min(self.lengths[row], length)
        if self.window is not None and not self.lengths[row]:
            self._set_base(row, 0, 0)

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Commit nodes of the pass just scored, given by their offsets in it (0 = the pending
        token), in path order.

        Offsets must increase, so a node never moves onto one that is still to be read.
        """
        start = self.lengths[row]
        # before it no node moves
        first = next((number for number, offset in enumerate(path) if number != offset), None)
        if first is not None and self.device.type == "cpu":
            self._move(row, start, first, path)
        elif first is not None:
            source = torch.tensor([start + offset for offset in path[first:]], device=self.device)
            begins = self.begins(row)
            sources = {begin: source - begin if begin else source for begin in {*begins}}
            for store, begin in zip((*self.keys, *self.values), begins, strict=True):
                line = store[row]  # index_select copies first: overlap is safe
                line[start + first - begin : start + len(path) - begin] = line.index_select(
                    0, sources[begin]
                )
        self.lengths[row] += len(path)

    def _move(self, row: int, start: int, first: int, path: Sequence[int]) -> None:
        """`keep` from node `first` of the path on, by moving memory: torch took half a millisecond
        for thirty layers."""
        runs: list[list[int]] = []  # to, from, positions: what follows one another goes together
        for number, offset in enumerate(path[first:], first):
            if runs and offset == runs[-1][1] + runs[-1][2]:
                runs[-1][2] += 1
            else:
                runs.append([number, offset, 1])
        for store, begin in zip((*self.keys, *self.values), self.begins(row), strict=True):
            if not store.numel():
                continue
            size = store.stride(1) * store.itemsize
            at = store.data_ptr() + store.stride(0) * store.itemsize * row + (start - begin) * size
            for to, origin, count in runs:
                ctypes.memmove(at + to * size, at + origin * size, count * size)

    def read(self, row: int, start: int, end: int) -> list[Tensor]:
        """Copies (end - start, KV heads, size) of committed positions: keys of every layer, then
        values."""
        assert not self.firsts[row] > start, (
            f"row {row} holds no positions before {self.firsts[row]} in layers with windows"
        )
        return self._copies(row, [start] * len(self.layers), end)

    @torch.inference_mode()
    def put(self, row: int, start: int, parts: Sequence[Tensor]) -> None:
        """Commit positions start .. start + n of a row that holds `start`, as `read` gave them
        elsewhere. Layers with windows keep the last ones."""
        count = parts[0].shape[0]
        self._put(row, start, start + count, parts)
        if self.window is not None:
            self._set_base(
                row, self.bases[row], max(self.firsts[row], start + count - self.window - KEPT_BACK)
            )

    def _copies(self, row: int, starts: Sequence[int], end: int) -> list[Tensor]:
        """Copies of positions from `starts`, by layer, to `end`."""
        stores = zip((*self.keys, *self.values), (*starts, *starts), self.begins(row), strict=True)
        return [store[row, start - begin : end - begin].clone() for store, start, begin in stores]

    def _put(self, row: int, start: int, end: int, parts: Sequence[Tensor]) -> None:
        """Commits positions up to `end`, of which each layer gets the last ones."""
        assert self.lengths[row] == start, (
            f"row {row} holds {self.lengths[row]} positions, not {start}"
        )
        self.reserve(self.num_rows, end)
        self.slide(row, [end], [start], end - start)
        for store, part, begin in zip(
            (*self.keys, *self.values), parts, self.begins(row), strict=True
        ):
            count = min(part.shape[0], end - begin)
            store[row, end - begin - count : end - begin] = part[part.shape[0] - count :]
        self.lengths[row] = end

    def pack(self, row: int) -> Any:
        """All that a row holds, for `unpack` elsewhere; it stays here, too."""
        starts = [0 if shape.window is None else self.firsts[row] for shape in self.layers]
        return PackedRow(
            self.lengths[row],
            self.firsts[row],
            self._copies(row, starts, self.lengths[row]),
            self.skipped[row],
        )

    @torch.inference_mode()
    def unpack(self, row: int, packed: Any) -> None:
        """An empty row becomes what `pack` made elsewhere, which may be unpacked again."""
        self._put(row, 0, packed.length, packed.parts)
        self.skipped[row] = packed.skipped
        self._set_base(row, self.bases[row], max(self.bases[row], packed.first))

    def clear(self) -> None:
        """No rows, and nothing of them in memory that passes read."""
        for each in (self.lengths, self.skipped, self.bases, self.firsts):
            each.clear()
        self.scrub()

    def scrub(self) -> None:
        """Zero everything that is not committed. After a pass that made NaN: a masked position
        still enters products."""
        for row, length in enumerate(self.lengths):
            for store, begin in zip((*self.keys, *self.values), self.begins(row), strict=True):
                store[row, length - begin :] = 0
        for store in (*self.keys, *self.values):
            store[self.num_rows :] = 0

    def first_broken_layer(self) -> int | None:
        """The first layer with a NaN or infinite key or value anywhere; None when all are finite.
        For error messages."""
        for layer, stores in enumerate(zip(self.keys, self.values, strict=True)):
            if not all(torch.isfinite(store).all() for store in stores):
                return layer
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping contradicts itself. For tests and idle moments."""
        assert self.num_rows <= self.num_slots, f"{self.num_rows} rows in {self.num_slots} slots"
        assert self.capacity % BLOCK == 0, f"capacity {self.capacity} is no multiple of {BLOCK}"
        for row, length in enumerate(self.lengths):
            assert 0 <= length <= self.capacity, (
                f"row {row}: length {length} outside [0, {self.capacity}]"
            )
            base = self.bases[row]
            first = self.firsts[row]
            assert base % BLOCK == 0 <= base <= first <= length, (
                f"row {row}: holds {first} .. {length} after base {base}"
            )
            assert self.window is None or length - base <= self.window_capacity, (
                f"row {row}: {length - base} positions are held"
            )
        for layer, (shape, key, value) in enumerate(
            zip(self.layers, self.keys, self.values, strict=True)
        ):
            expected = (self.num_slots, self._capacity_of(layer), shape.num_kv_heads)
            assert key.shape == (*expected, shape.key_size), f"keys are {tuple(key.shape)}"
            assert value.shape == (*expected, shape.stored_value_size), (
                f"values are {tuple(value.shape)}"
            )

    def _windowed_stores(self) -> list[Tensor]:
        windows = [shape.window for shape in self.layers] * 2
        return [
            store
            for store, window in zip((*self.keys, *self.values), windows, strict=True)
            if window is not None
        ]

    def begins(self, row: int) -> list[int]:
        """The position of a row that comes first in its slot, of the keys of every layer, then the
        values."""
        return [0 if shape.window is None else self.bases[row] for shape in self.layers] * 2

    def _capacity_of(self, layer: int) -> int:
        return self.capacity if self.layers[layer].window is None else self.window_capacity

    def _window_room(self, capacity: int) -> int:
        """Positions of a slot of this capacity in layers with windows: what they hold, up to a
        block before it, and a pass."""
        held = (self.window or 0) + KEPT_BACK
        return max(self.window_capacity, min(capacity, _round_up(held + BLOCK + CHUNK_ROOM, BLOCK)))

    # ordinary tensors, wherever growth happens: rows also leave outside inference mode
    @torch.inference_mode(False)
    def _allocate(self, num_slots: int, capacity: int, window_capacity: int = 0) -> None:
        # Zeros, not empty: masked positions still enter a product with weight 0, and 0 * NaN would
        # be NaN.
        self._capacity, self._window_capacity = (
            capacity,
            max(window_capacity, self._window_room(capacity)),
        )
        heads = [shape.num_kv_heads for shape in self.layers] * 2
        sizes = [
            *(shape.key_size for shape in self.layers),
            *(shape.stored_value_size for shape in self.layers),
        ]
        rooms = [self._capacity_of(layer) for layer in range(len(self.layers))] * 2
        shapes = [
            (num_slots, room, count, size)
            for room, count, size in zip(rooms, heads, sizes, strict=True)
        ]
        old = [*self.keys, *self.values]
        stores = list[Tensor]()
        self.keys = []
        self.values = []
        # a few at a time, so that old memory is given back as new memory is taken
        while len(stores) < len(shapes):
            few = self._few(shapes[len(stores) :])
            on_cpu = self.device.type == "cpu"
            tensors = (
                zeros_on_huge_pages(few, self.dtype)
                if on_cpu
                else [torch.zeros(few[0], dtype=self.dtype, device=self.device)]
            )
            for store in tensors:
                if old:
                    before = old.pop(0)
                    store[: before.shape[0], : before.shape[1]] = before
            stores += tensors
        self.keys, self.values = stores[: len(self.layers)], stores[len(self.layers) :]

    def _few(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
        """The first of these shapes, and on a CPU those after it that share a block of huge pages."""
        if self.device.type != "cpu":
            return shapes[:1]
        ends = accumulate(prod(shape) * self.dtype.itemsize for shape in shapes)
        return shapes[: 1 + sum(end < CHUNK for end in ends)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
