"""Rows whose state cannot be cut: a cache of states, one object per row, that is rolled back to
snapshots and fed again.

    row b    tokens    [ committed: 0 .. lengths[b] )[ of the last pass, not committed )
             state     that of all tokens up to `reached`: more than is committed, or fewer
             snapshots the state before earlier passes, by their lengths

A recurrent state has no position that could be left out. So the state before a pass is kept, a
rejected pass is forgotten by going back to it, and the committed tokens that the state then lacks,
its backlog, stand before the next pass's own. Nothing is fed again in a pass of its own unless the
backlog grows long. After a commit a row is what a fresh start on its tokens would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from outrider.kv.cache import BLOCK, KVCache, LayerShape

SPACING = 32  # tokens: snapshots nearer than this to an older one make room for the next
# of a row: the newest for a target, older ones for a draft that goes back over several passes
MAX_SNAPSHOTS = 3


class State(Protocol):
    """The state of a model after a text."""

    def copy(self) -> Self:
        """One that passes may change without changing this one."""

    def mark(self) -> Self:
        """A snapshot to go back to while the row lives on; it may lean on what later states of the
        row still hold."""

    def back_to(self, mark: Self) -> Self:
        """The state as it was at `mark`, a snapshot of an earlier state of this row, which stays as
        it is."""

    def first_broken_layer(self) -> int | None:
        """The first layer with a NaN or infinite number; None when all are finite."""


S = TypeVar("S", bound=State)


@dataclass
class _Row(Generic[S]):
    state: S | None = None  # None: of no token
    reached: int = 0  # tokens that the state has seen
    tokens: list[int] = field(default_factory=list)  # committed ones, then those of the last pass
    # (tokens seen, state), oldest first
    snapshots: list[tuple[int, S]] = field(default_factory=list)


@dataclass(frozen=True)
class Packed(Generic[S]):
    """A row outside its cache: its committed tokens, and the state of the first `reached` of them."""

    tokens: tuple[int, ...]
    reached: int
    state: S | None


class StateCache(KVCache, Generic[S]):
    """States of every row that cannot be cut, with snapshots to go back to.

    The interface is `KVCache`'s, but for what looks at single positions: `read`, `put`.
    """

    by_position = False

    bytes_per_token = 1  # counted for each token of a row; measured when the model is loaded

    def __init__(
        self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        # no super().__init__: nothing is allocated
        self.layers = list(layers)
        self.dtype = dtype
        self.device = torch.device(device)
        self.lengths = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._rows: list[_Row[S]] = []

    @property
    def num_slots(self) -> int:
        return max(1, self.num_rows)

    @property
    def capacity(self) -> int:
        return -(-max([1, *self.lengths]) // BLOCK) * BLOCK

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Do nothing: states grow as they are fed."""

    def size_for(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """(rows, positions per row) to count memory by."""
        return max(self.num_slots, num_rows), max(self.capacity, -(-num_tokens // BLOCK) * BLOCK)

    def shrink(self, num_slots: int, capacity: int) -> None:
        """Do nothing: there is no memory beyond what rows use."""

    def add_row(self) -> int:
        """A new empty row at the end of the batch; returns its index."""
        self.lengths.append(0)
        self._rows.append(_Row())
        return self.num_rows - 1

    def swap_remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        self.lengths[row], self._rows[row] = self.lengths[-1], self._rows[-1]
        self.lengths.pop()
        self._rows.pop()

    def clear(self) -> None:
        """No rows."""
        self.lengths.clear()
        self._rows.clear()

    def text_length(self, row: int) -> int:
        return self.lengths[row]

    def advance(self, row: int, count: int) -> None:
        """Commit the next `count` tokens of the last pass."""
        self.lengths[row] += count
        assert self.lengths[row] <= len(self._rows[row].tokens), (
            "more tokens are committed than the last pass had"
        )

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Commit the first tokens of the pass just scored: `path` is 0, 1, 2, ... Raises ValueError
        for another path."""
        if list(path) != list(range(len(path))):
            raise ValueError(
                f"a running state keeps the beginning of a chain, not nodes {list(path)} of a tree"
            )
        self.advance(row, len(path))

    def pack(self, row: int) -> Packed[S]:
        """A row to be taken elsewhere; it stays here, too."""
        self._go_back(row, self.lengths[row])
        line = self._rows[row]
        state = None if line.state is None else line.state.copy()
        return Packed(tuple(line.tokens[: self.lengths[row]]), line.reached, state)

    def unpack(self, row: int, packed: Packed[S]) -> None:
        """An empty row becomes what `pack` made elsewhere, which may be unpacked again."""
        assert self.lengths[row] == 0, f"row {row} holds {self.lengths[row]} tokens, not 0"
        state = None if packed.state is None else packed.state.copy()
        self._rows[row] = _Row(state, packed.reached, list(packed.tokens))
        self.lengths[row] = len(packed.tokens)

    # ---------------------------------------------------------------- passes

    def backlog(self, row: int) -> list[int]:
        """Committed tokens that the row's state lacks, after going back where it had too many."""
        self._go_back(row, self.lengths[row])
        line = self._rows[row]
        del line.tokens[self.lengths[row] :]
        return line.tokens[line.reached :]

    def reached(self, row: int) -> int:
        """Tokens that the row's state has seen."""
        return self._rows[row].reached

    def open(self, row: int) -> S | None:
        """The state that a pass is about to change; a snapshot of it is kept. None at the beginning
        of a text."""
        line = self._rows[row]
        if line.state is not None and (not line.snapshots or line.snapshots[-1][0] != line.reached):
            few = (
                len(line.snapshots) > 1 and line.snapshots[-1][0] - line.snapshots[-2][0] < SPACING
            )
            line.snapshots[len(line.snapshots) - few :] = [(line.reached, line.state.mark())]
            del line.snapshots[:-MAX_SNAPSHOTS]
        return line.state

    def close(self, row: int, state: S, fed: Sequence[int]) -> None:
        """Record the state after a pass over `fed`."""
        line = self._rows[row]
        line.tokens[line.reached : line.reached + len(fed)] = fed
        line.state = state
        line.reached += len(fed)

    def _go_back(self, row: int, length: int) -> None:
        """Goes back to the newest snapshot that has seen at most `length` tokens, where the row's
        state has seen more."""
        line = self._rows[row]
        if line.reached <= length:
            return
        while line.snapshots and line.snapshots[-1][0] > length:
            line.snapshots.pop()
        if line.snapshots and line.state is not None:
            line.reached, mark = line.snapshots[-1]
            line.state = line.state.back_to(mark)
        else:
            line.reached = 0
            line.state = None

    # ---------------------------------------------------------------- care

    def scrub(self) -> None:
        """Forget what is not committed."""
        for row, length in enumerate(self.lengths):
            self._go_back(row, length)

    def first_broken_layer(self) -> int | None:
        """The first layer with a NaN or infinite number in any row's state; None when all are
        finite. For error messages."""
        layers = [line.state.first_broken_layer() for line in self._rows if line.state is not None]
        return min((layer for layer in layers if layer is not None), default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping contradicts itself. For tests and idle moments."""
        assert len(self._rows) == self.num_rows, (
            f"{len(self._rows)} states for {self.num_rows} rows"
        )
        for row, (line, length) in enumerate(zip(self._rows, self.lengths, strict=True)):
            assert 0 <= length <= len(line.tokens), (
                f"row {row}: length {length} of {len(line.tokens)} tokens"
            )
            assert line.reached <= len(line.tokens), (
                f"row {row}: its state has seen {line.reached} of {len(line.tokens)} tokens"
            )
            assert (line.state is None) == (line.reached == 0), (
                f"row {row}: a state of {line.reached} tokens"
            )
            marks = [reached for reached, _ in line.snapshots]
            assert marks == sorted(set(marks)), f"row {row}: snapshots at {marks}"
            assert len(marks) <= MAX_SNAPSHOTS, f"row {row}: {len(marks)} snapshots"

    def read(self, row: int, start: int, end: int) -> list[Tensor]:
        raise NotImplementedError(
            "a running state has no positions to read; `pack` gives the whole row"
        )

    def put(self, row: int, start: int, parts: Sequence[Tensor]) -> None:
        raise NotImplementedError(
            "a running state has no positions to put; `unpack` takes the whole row"
        )
