"""The context of a block head's rows: keys and values of the target's states, the newest of which
are still unprojected.

A step ends with states of the tokens that stayed. They are not read at once: the next pass of the
head takes them along (`models/heads/block_pass.py`), so a step costs one pass, and one that drafts
nothing costs none. Whatever else happens to the rows, `settle` reads what waits first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.kv.cache import KVCache, LayerShape
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_pass import BlockPasses, Guessed, Pending, Unread
from outrider.rows import Rows
from outrider.runtime.block import BlockRun, Drafted

MAX_WAITING = 64  # states of a row that wait at most, drafting or not


class BlockContext:
    """Rows in the order of the batch. `kv` holds what is settled."""

    def __init__(
        self, config: BlockConfig, passes: BlockPasses, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._passes = passes
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        self.kv = KVCache([shape] * config.num_layers, dtype, device)
        self._parts: list[Unread] = []

    def add_row(self) -> None:
        self.settle()
        self.kv.add_row()

    def swap_remove(self, index: int) -> None:
        self.settle()
        self.kv.swap_remove(index)

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        """States (T, target H) of a chunk of a row's prompt that begins at text index `start`."""
        self.settle()
        states = [hidden[layer][None] for layer in self._config.target_layers]
        count = states[0].shape[1]
        self._read(index, Unread(states, [count], [start + count]))

    def commit(
        self, hidden: Mapping[int, Tensor], num_kept: list[list[int]], ends: list[int]
    ) -> None:
        """The columns kept[b] of a pass's states (B, T, target H) belong to the text, which they
        end at index ends[b]."""
        counts = [len(columns) for columns in num_kept]
        width = max(counts)
        states = [hidden[layer][:, :width] for layer in self._config.target_layers]
        if any(
            columns != list(range(len(columns))) for columns in num_kept
        ):  # a path through a tree
            columns = torch.tensor(
                [line + [0] * (width - len(line)) for line in num_kept], device=self.kv.device
            )
            rows = torch.arange(len(num_kept), device=self.kv.device)[:, None]
            states = [hidden[layer][rows, columns] for layer in self._config.target_layers]
        self._parts.append(Unread(states, counts, ends))
        if max(map(sum, zip(*(part.counts for part in self._parts), strict=True))) >= MAX_WAITING:
            self.settle()

    @torch.inference_mode()
    def settle(self) -> None:
        """Read what waits."""
        unread = self._taken()
        if unread is not None:
            self._read(0, unread)

    def guess(self, rows: Rows) -> Guessed:
        """One pass over a block after every row, which takes along what waits."""
        unread = self._taken()
        self._reserve(0, unread, self._config.block_size)
        found = self._passes.guess(self.kv, _pending(rows), unread)
        self._advance(0, unread)
        return found

    def draft(self, run: BlockRun, rows: Rows, num_tokens: int) -> Drafted | None:
        """That pass and what it drafts, in one call."""
        unread = self._taken()
        self._reserve(0, unread, self._config.block_size)
        drafted = run.draft(self.kv, rows, _pending(rows), unread, num_tokens)
        self._advance(0, unread)
        return drafted

    def _taken(self) -> Unread | None:
        """Take the states that wait."""
        parts = self._parts
        self._parts = []
        return _joined(parts) if parts else None

    def _read(self, first_row: int, unread: Unread) -> None:
        """Commit these states to the rows from `first_row` on."""
        self._reserve(first_row, unread)
        self._passes.read(self.kv, first_row, unread)
        self._advance(first_row, unread)

    def _reserve(self, first_row: int, unread: Unread | None, more: int = 0) -> None:
        """Room for a pass: padding of shorter rows is written, too."""
        num_rows, width = (
            (self.kv.num_rows, 0) if unread is None else (len(unread.counts), unread.width)
        )
        longest = max(self.kv.lengths[first_row : first_row + num_rows])
        self.kv.reserve(self.kv.num_rows, longest + width + more)

    def _advance(self, first_row: int, unread: Unread | None) -> None:
        for row, count in enumerate([] if unread is None else unread.counts, start=first_row):
            self.kv.advance(row, count)


def _pending(rows: Rows) -> Pending:
    return Pending([row.tokens[-1] for row in rows], [len(row.tokens) - 1 for row in rows])


def _joined(parts: list[Unread]) -> Unread:
    """Parts that follow one another in the texts, as one."""
    if len(parts) == 1:
        return parts[0]
    counts = [sum(line) for line in zip(*(part.counts for part in parts), strict=True)]
    hidden = []
    for layers in zip(*(part.hidden for part in parts), strict=True):
        lines = (
            torch.cat(
                [
                    states[row, : part.counts[row]]
                    for states, part in zip(layers, parts, strict=True)
                ]
            )
            for row in range(len(counts))
        )
        hidden.append(pad_sequence(list(lines), batch_first=True))
    return Unread(hidden, counts, parts[-1].ends)
