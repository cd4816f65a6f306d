"""Best-first trees of draft tokens on the executor: catch-up, passes and choices of a whole batch
in one call.

Growing them level by level is the reference (`drafters/model/draft_tree.py`):
`tests/unit/runtime/test_growing.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kv import KVCache
from outrider.kv.state_slots import StateSlots
from outrider.models.lm import LM
from outrider.rows import Rows
from outrider.runtime.drafting import first_pass, noise_tables
from outrider.runtime.run import Bound, FirstPass, NativeRun, addresses
from outrider.runtime.structures import GrowingStruct


class TreeLimits(NamedTuple):
    """How best-first trees grow: see `trees/growth.py`."""

    top_k: int
    max_depth: int
    min_gain: float

    def max_fed(self, budget: int) -> int:
        """Nodes that a tree of `budget` nodes feeds to the model at most."""
        return min(self.top_k, budget) * (min(self.max_depth, budget) - 1)


class GrownTrees(NamedTuple):
    """Trees of a batch, of N nodes at most."""

    lengths: Tensor  # (B,) int64
    tokens: Tensor  # (B, N) int64
    parents: Tensor  # (B, N) int64, -1: the pending token
    # (B, N): which of the tokens that the model was fed after the first pass a node is; -1: none
    fed: list[list[int]]
    values: list[list[float]]  # of each node, the product of the draft's probabilities on its path

    def only(self, kept: Sequence[Sequence[int]]) -> GrownTrees:
        """Trees of these nodes of each row, in ascending order, parents among them."""
        width = max(map(len, kept))
        tokens = torch.zeros(len(kept), width, dtype=torch.int64)
        parents = torch.full_like(tokens, -1)
        for row, nodes in enumerate(kept):
            number = {-1: -1} | {node: new for new, node in enumerate(nodes)}
            tokens[row, : len(nodes)] = self.tokens[row, list(nodes)]
            above = self.parents[row].tolist()
            parents[row, : len(nodes)] = torch.tensor([number[above[node]] for node in nodes])
        return GrownTrees(
            torch.tensor(list(map(len, kept))),
            tokens,
            parents,
            [[fed[node] for node in nodes] for fed, nodes in zip(self.fed, kept, strict=True)],
            [[each[node] for node in nodes] for each, nodes in zip(self.values, kept, strict=True)],
        )


def grow_trees(
    bound: Bound,
    kv: KVCache,
    rows: Rows,
    first: FirstPass,
    limits: TreeLimits,
    budgets: Sequence[int],
    last_position: int,
    known: Tensor | None,
) -> GrownTrees | None:
    """A tree for each row, of at most budgets[b] nodes; commits nothing. None where a row's scores
    are not numbers.

    Every row's candidates are ranked by the softmax of the scores, with the shared noise where rows
    race. The cache has room for all that is written. `known` (V',): the target's id of every token
    that is scored; None: they are the same.
    """
    program = bound.executor.program
    num_rows = len(budgets)
    num_nodes = max(budgets)
    assert program.logits is not None
    levels = min(limits.max_depth, num_nodes)
    max_expanded = min(limits.top_k, num_nodes)
    max_tokens = max(first.ids.shape[1], max_expanded)
    carried = (
        torch.empty(num_rows, max_tokens, program.hidden_size, dtype=kv.dtype)
        if first.inputs
        else None
    )
    asked = torch.tensor(budgets)
    heat = rows.soft_sampling.options[:, 0].contiguous()
    noise = noise_tables(rows, levels)
    tables = addresses(noise)
    lengths = torch.empty_like(asked)
    (tokens, parents, fed) = torch.empty(3, num_rows, num_nodes, dtype=torch.int64)
    values = torch.empty(num_rows, num_nodes, dtype=torch.float64)
    struct = GrowingStruct(
        nodes=num_nodes,
        top_k=limits.top_k,
        max_depth=levels,
        min_gain=limits.min_gain,
        width=min(program.logits.cols, rows.vocab_size) if known is None else program.logits.cols,
        last_position=last_position,
        budgets=asked.data_ptr(),
        temperatures=heat.data_ptr(),
        noise=ctypes.addressof(tables),
        known=None if known is None else known.data_ptr(),
        carried=None if carried is None else carried.data_ptr(),
        carried_bytes=0 if carried is None else carried.shape[2] * carried.itemsize,
        lengths=lengths.data_ptr(),
        tokens=tokens.data_ptr(),
        parents=parents.data_ptr(),
        values=values.data_ptr(),
        fed=fed.data_ptr(),
    )
    rotary = bound.rotary.up_to(max(map(max, first.positions.tolist())) + limits.max_depth)
    bases = torch.tensor(kv.bases) if kv.is_short else None
    grown = bound.executor.grow(
        first, kv.keys, kv.values, rotary, carried, struct, (max_tokens, max_expanded), bases
    )
    if not grown:
        return None
    width = max(lengths.tolist())
    return GrownTrees(
        lengths,
        tokens[:, :width].contiguous(),
        parents[:, :width].contiguous(),
        fed.tolist(),
        values.tolist(),
    )


class ModelTrees:
    """Whole trees of a draft model: what `draft_tree.py` does level by level."""

    def __init__(self, lm: LM, run: NativeRun) -> None:
        """`run` makes the passes of `lm`, which keeps no running states."""
        assert not isinstance(lm.kv, StateSlots)
        self._lm = lm
        self._run = run

    def grow(
        self, rows: Rows, pending: Sequence[list[int]], limits: TreeLimits, budgets: Sequence[int]
    ) -> GrownTrees | None:
        """See `grow_trees`: after rows whose caches lack these tokens."""
        lm = self._lm
        kv = self._lm.kv
        last = self._lm.shape.context_length - 1
        num_behind = limits.max_fed(max(budgets))
        first = first_pass(kv, pending, num_behind, last, lm.shape.vocab_size)
        return grow_trees(self._run.bound, kv, rows, first, limits, budgets, last, None)
