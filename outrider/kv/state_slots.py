"""Running states alongside keys and values: recurrent layers and short convolutions on our own cache,
rolled back without a copy.

    slot b of an operation   states    [ base ][ tip ]    two buffers: after the first `base` tokens, and after the first `tip`
                             records   what each token of base .. tip gave the state, position p at p % (records of a slot)

A pass begins at the row's committed length. Where that is `tip`, nothing was rejected: the tip
becomes the base, and the other buffer takes the new tip. Where it is less, the pass first brings
the base forward by the records of the tokens that were kept, in the same arithmetic as when they
were passed, and continues from there. So a rejection costs some updates of a state in the next pass,
no pass and no copy, and a state has the same bits however its text was cut into passes.

A pass over a tree of tokens leaves records alone, in the order of its nodes; those of the kept path
move together, as keys and values do. A pass of one token may be a draft's, of which many are taken
back at once: it leaves the base up to `LAG` tokens behind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kv.cache import BLOCK, KVCache, LayerShape, PackedRow

LAG = 32  # tokens that the base may stay behind passes of one token each
HELD_BACK = 24  # and stays behind at least, where it is brought forward then
NUM_RECORDS = 40  # of a slot, at first


@dataclass(frozen=True)
class StateShape:
    """The state of a row for one operation: `size` fp32 numbers, and `record_bytes` for each token
    that may be taken back."""

    size: int
    record_bytes: int


@dataclass(frozen=True)
class Move:
    """The move of one row's states in a pass, as the executor reads it (`native/recurrent.h`)."""

    base: int  # the buffer that is brought forward
    begin: int  # the tokens that the state at the source has seen,
    end: int  # and those that it has seen afterwards
    source: int  # the buffer that the pass continues from
    target: int  # where it leaves the state after its last token
    is_recorded: int  # whether its tokens may be taken back one by one


@dataclass(frozen=True)
class StatePass:
    """The states that a pass reads and writes."""

    states: list[Tensor]  # per operation (slots, 2, size) fp32
    records: list[Tensor]  # per operation (slots, records, bytes) uint8
    moves: np.ndarray  # (B, 6) int64, the fields of `Move`; of several passes one after the other
    starts: Sequence[int] = ()  # (B,) positions in front of the pass
    on_device: Tensor | None = None  # `table`, where it is made already

    @property
    def num_records(self) -> int:
        return self.records[0].shape[1]

    def table(self, device: torch.device) -> Tensor:
        """The rows (B, 8) int64 as kernels on a device read them: move, start, and 1, because
        states are to be written."""
        if self.on_device is not None:
            return self.on_device
        rest = np.stack([np.array(self.starts), np.ones(len(self.starts), dtype=np.int64)], axis=1)
        return torch.from_numpy(np.concatenate([self.moves, rest], axis=1)).to(device)


@dataclass(frozen=True)
class _Line:
    """How many tokens the states of a row have seen."""

    base: int = 0  # tokens that the base has seen
    tip: int = 0
    which: int = 0  # the buffer of the base
    is_recorded: bool = True  # whether records of base .. tip are there

    def holds(self, length: int) -> bool:
        """Whether a pass may begin at this length."""
        return length in (self.base, self.tip) or (
            self.is_recorded and self.base < length < self.tip
        )


@dataclass(frozen=True)
class PackedStates:
    """A row outside its cache: keys and values of `reached` tokens, states of the first `base`, and
    records of the others."""

    reached: int
    base: int
    keys_and_values: PackedRow
    states: list[Tensor]  # per operation (size,)
    records: list[Tensor]  # per operation (reached - base, bytes)


class StateSlots(KVCache):
    """Keys and values of the layers that have them, and running states of the others.

    The interface is `KVCache`'s, but for what looks at single positions: `read`, `put`.
    """

    by_position = False

    def __init__(
        self,
        layers: Sequence[LayerShape],
        shapes: Sequence[StateShape],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.shapes = list(shapes)
        self.states: list[Tensor] = []
        self.records: list[Tensor] = []
        self._lines: list[_Line] = []
        super().__init__(layers, dtype, device)

    @property
    def num_records(self) -> int:
        """Tokens of a slot that may be taken back."""
        return self.records[0].shape[1] if self.records else NUM_RECORDS

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of a token in a long text, and a block's share of the states."""
        return super().bytes_per_token + -(-self._state_bytes() // BLOCK)

    @property
    def allocated_bytes(self) -> int:
        keys_and_values = super().bytes_per_token * self.capacity - self.saved_bytes(self.capacity)
        return self.num_slots * (keys_and_values + self._state_bytes())

    def _state_bytes(self) -> int:
        """Bytes of a slot's states and records."""
        return sum(
            2 * 4 * shape.size + self.num_records * shape.record_bytes for shape in self.shapes
        )

    def shrink(self, num_slots: int, capacity: int) -> None:
        super().shrink(num_slots, capacity)
        for stores in (self.states, self.records):
            for number, store in enumerate(stores):
                stores[number] = store[:num_slots].clone()

    def add_row(self) -> int:
        row = super().add_row()
        self._lines.append(_Line())
        return row

    def swap_remove(self, row: int) -> None:
        last = self.num_rows - 1
        super().swap_remove(row)
        if row != last:
            for store in (*self.states, *self.records):
                store[row] = store[last]
            self._lines[row] = self._lines[last]
        self._lines.pop()

    def clear(self) -> None:
        self._lines.clear()
        super().clear()

    def reached(self, row: int) -> int:
        """Tokens that `pack` takes along."""
        return self.lengths[row]

    def advance(self, row: int, count: int) -> None:
        """Commit the next `count` tokens of the last pass. Raises ValueError for some tokens of a
        long prompt's pass."""
        self._check_length(row, self.lengths[row] + count)
        super().advance(row, count)

    def truncate(self, row: int, length: int) -> None:
        """Forget everything from position `length` on, and more where the state at that position is
        gone: the caller then feeds what the cache lacks."""
        length = min(self.lengths[row], length)
        line = self._lines[row]
        if not line.holds(length):
            length = line.base if line.base < length else 0
        super().truncate(row, length)
        if self.lengths[row] < line.base:
            self._lines[row] = _Line()

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Commit nodes of the pass just scored, as `KVCache.keep`. Raises ValueError for some
        tokens of a long prompt's pass."""
        start = self.lengths[row]
        self._check_length(row, start + len(path))
        first = next((number for number, offset in enumerate(path) if number != offset), None)
        super().keep(row, path)
        if first is not None:
            self._move_records(row, start, first, path)

    def _check_length(self, row: int, length: int) -> None:
        line = self._lines[row]
        if not line.holds(length):
            raise ValueError(
                f"row {row}: states continue at {line.base} or {line.tip} tokens, not at {length}"
            )

    def _move_records(self, row: int, start: int, first: int, path: Sequence[int]) -> None:
        """Move records of a path's nodes, from number `first` on, to their positions. Offsets
        increase: all are read in time."""
        slots = [
            ((start + number) % self.num_records, (start + offset) % self.num_records)
            for number, offset in enumerate(path[first:], first)
        ]
        if self.device.type != "cpu":
            targets, sources = torch.tensor(slots, device=self.device).T
            for store in self.records:
                store[row, targets] = store[row, sources]
            return
        for store in self.records:
            size = store.shape[2]
            at = store.data_ptr() + row * self.num_records * size
            for to, origin in slots:
                ctypes.memmove(at + to * size, at + origin * size, size)

    def begin(
        self, first_row: int, num_rows: int, width: int, *, reads: bool, in_tree: bool = False
    ) -> StatePass:
        """Before a pass of `width` tokens over these rows. `reads`: of a text's own tokens, of
        which none will be rejected; `in_tree`: of tokens that may follow others than the ones
        before them."""
        starts = self.lengths[first_row : first_row + num_rows]
        if in_tree or not reads:
            self._record(first_row, num_rows, width)
        moves = self._moves(first_row, starts, width)
        if in_tree:
            for row in range(first_row, first_row + num_rows):
                # no buffer has the state there
                self._lines[row] = replace(self._lines[row], tip=self._lines[row].tip + 1)
        if not first_row:
            return StatePass(self.states, self.records, moves, starts)
        states, records = (
            [store[first_row:] for store in stores] for stores in (self.states, self.records)
        )
        return StatePass(states, records, moves, starts)

    def begin_chain(self, counts: Sequence[int], num_passes: int) -> StatePass:
        """Before passes of the first rows that follow one another: one as wide as the most tokens
        of a row, of which the first `counts[row]` count, and others of one token each. It has the
        moves of all passes (num_passes * B, 6), in their order."""
        starts = self.lengths[: len(counts)]
        width = max(counts)
        self._record(0, len(counts), width)
        moves = [self._moves(0, starts, width)]
        for done in range(num_passes - 1):
            moves.append(
                self._moves(
                    0,
                    [start + count + done for start, count in zip(starts, counts, strict=True)],
                    1,
                )
            )
        return StatePass(self.states, self.records, np.concatenate(moves))

    def _record(self, first_row: int, num_rows: int, width: int) -> None:
        """Make room for the records of a pass of `width` tokens over these rows."""
        rows = range(first_row, first_row + num_rows)
        self._make_records(max(self.lengths[row] - self._lines[row].base for row in rows) + width)

    def _moves(self, first_row: int, starts: Sequence[int], width: int) -> np.ndarray:
        """The moves of the rows from `first_row` on (B, 6) in a pass that begins at these lengths;
        it is taken for done."""
        moves = np.empty((len(starts), 6), dtype=np.int64)
        for index, start in enumerate(starts):
            row = first_row + index
            self._lines[row], move = _moved(self._lines[row], start, width, self.num_records)
            moves[index] = (
                move.base,
                move.begin,
                move.end,
                move.source,
                move.target,
                move.is_recorded,
            )
        return moves

    # ---------------------------------------------------------------- rows that leave and come

    @torch.inference_mode()
    def pack(self, row: int) -> PackedStates:
        length = self.lengths[row]
        line = self._lines[row]
        at_tip = length == line.tip
        base, which = (line.tip, 1 - line.which) if at_tip else (line.base, line.which)
        slots = torch.arange(base, length) % self.num_records
        return PackedStates(
            length,
            base,
            super().pack(row),
            [store[row, which].clone() for store in self.states],
            [store[row, slots.to(self.device)] for store in self.records],
        )

    @torch.inference_mode()
    def unpack(self, row: int, packed: PackedStates) -> None:
        super().unpack(row, packed.keys_and_values)
        recorded = packed.reached - packed.base
        self._make_records(recorded)
        slots = torch.arange(packed.base, packed.reached) % self.num_records
        for store, state in zip(self.states, packed.states, strict=True):
            store[row] = state
        for store, records in zip(self.records, packed.records, strict=True):
            store[row, slots.to(self.device)] = records
        # one token more than is committed, so that nobody takes the other buffer for the state
        # after the last one
        self._lines[row] = _Line(packed.base, packed.reached + (recorded > 0), 0)

    def read(self, row: int, start: int, end: int) -> list[Tensor]:
        raise NotImplementedError(
            "a running state has no positions to read; `pack` gives the whole row"
        )

    def put(self, row: int, start: int, parts: Sequence[Tensor]) -> None:
        raise NotImplementedError(
            "a running state has no positions to put; `unpack` takes the whole row"
        )

    # ---------------------------------------------------------------- care

    def first_broken_layer(self) -> int | None:
        """The first layer with a NaN or infinite number; the last one where only states have them,
        which know no layer."""
        if (layer := super().first_broken_layer()) is not None:
            return layer
        used = slice(0, max(self.num_rows, 1))
        is_whole = all(bool(torch.isfinite(store[used]).all()) for store in self.states)
        return None if is_whole else len(self.layers) - 1

    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._lines) == self.num_rows, (
            f"{len(self._lines)} states for {self.num_rows} rows"
        )
        for row, (line, length) in enumerate(zip(self._lines, self.lengths, strict=True)):
            assert line.base <= length <= max(line.tip, line.base), (
                f"row {row}: length {length}, its states {line}"
            )
            assert line.holds(length), f"row {row}: no state after {length} tokens, {line}"
        for shape, states, records in zip(self.shapes, self.states, self.records, strict=True):
            assert states.shape == (self.num_slots, 2, shape.size), (
                f"states are {tuple(states.shape)}"
            )
            assert records.shape == (self.num_slots, self.num_records, shape.record_bytes), (
                f"records are {tuple(records.shape)}"
            )

    # ---------------------------------------------------------------- memory

    @torch.inference_mode(False)
    def _allocate(self, num_slots: int, capacity: int, window_capacity: int = 0) -> None:
        super()._allocate(num_slots, capacity, window_capacity)
        if self.states and len(self.states[0]) == num_slots:
            return
        self.states = [
            _grown(old, (num_slots, 2, shape.size), torch.float32, self.device)
            for old, shape in _paired(self.states, self.shapes)
        ]
        sizes = [(num_slots, self.num_records, shape.record_bytes) for shape in self.shapes]
        self.records = [
            _grown(old, size, torch.uint8, self.device)
            for old, size in _paired(self.records, sizes)
        ]

    @torch.inference_mode(False)
    def _make_records(self, count: int) -> None:
        """Room for this many records of a slot, each in its new slot."""
        before = self.num_records
        if count <= before:
            return
        after = max(count, 2 * before)
        old = self.records
        self.records = []
        for shape, store in zip(self.shapes, old, strict=True):
            buffer = torch.zeros(
                self.num_slots, after, shape.record_bytes, dtype=torch.uint8, device=self.device
            )
            for row, line in enumerate(self._lines):
                positions = torch.arange(
                    line.base, line.tip if line.is_recorded else line.base, device=self.device
                )
                buffer[row, positions % after] = store[row, positions % before]
            self.records.append(buffer)


def _moved(line: _Line, start: int, width: int, num_records: int) -> tuple[_Line, Move]:
    """The move of a row's states in a pass that begins at `start`, and the tokens they have seen
    after it."""
    base = line.base
    which = line.which
    if start != line.tip:
        is_recorded = start - base + width <= num_records
        return _Line(start, start + width, which, is_recorded), Move(
            which, base, start, which, 1 - which, is_recorded
        )
    if width == 1 and line.is_recorded and base < start and start - base < num_records:
        end = start - HELD_BACK if start - base >= LAG else base
        return replace(line, base=end, tip=start + 1), Move(
            which, base, end, 1 - which, 1 - which, is_recorded=1
        )
    is_recorded = width <= num_records
    return _Line(start, start + width, 1 - which, is_recorded), Move(
        which, base, base, 1 - which, which, is_recorded
    )


def _grown(
    old: Tensor | None, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    buffer = torch.zeros(*size, dtype=dtype, device=device)
    if old is not None:
        buffer[: len(old)] = old
    return buffer


def _paired(old: Sequence[Tensor], others: Sequence[Any]) -> list[tuple[Tensor | None, Any]]:
    before: list[Tensor | None] = [*old] or [None] * len(others)
    return list(zip(before, others, strict=True))
