"""Tree verification of a few rows on the CPU: the rules of `tree.py` and `traversal.py`, one row
and one node at a time.

For a handful of rows the batched form pays more for gathering and scattering rows than for
arithmetic. Same results to rounding; `tests/unit/sampling/test_tree_rows.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outrider.types import Draft

FEW_ROWS = 8


class RowResiduals:
    """`tree.Residuals` of one row."""

    def __init__(self, target_probs: np.ndarray, draft: Draft, row: int) -> None:
        self.weights = target_probs  # (N+1, V), ours to change
        self.mass = np.ones(len(target_probs), dtype=target_probs.dtype)
        self.children = draft.children[row]
        self._tokens = draft.lists[0][row]
        self._parents = draft.parent_lists[row]
        self._drawn = draft.is_sampled()[row].tolist()
        self._laws: dict[int, np.ndarray] = {}  # output -> what the next sibling was drawn from
        self._probs = None if draft.probs is None else draft.probs[row].numpy()
        self._replacement = draft.replacement

    def ratio(self, node: int) -> float:
        """a p(x)/q(x)."""
        token = self._tokens[node]
        parent = self._parents[node] + 1
        wanted = self.weights[parent, token]
        if not self._drawn[node]:
            return float(wanted)
        return float(wanted / max(self._law(parent)[token], np.finfo(wanted.dtype).tiny))

    def reject(self, node: int) -> None:
        """The node is out: its parent now stands for [a p - q]+, rescaled."""
        token = self._tokens[node]
        parent = self._parents[node] + 1
        weights = self.weights[parent]
        mass = self.mass[parent]
        if self._drawn[node]:
            residual = np.maximum(weights - self._law(parent), 0)
        else:
            residual = weights.copy()
            residual[token] = 0
        total = residual.sum()
        scale = total + (1 - mass)
        if scale > 0:  # else this child is kept with certainty
            np.divide(residual, scale, out=weights)
            self.mass[parent] = total / scale
        if node != self.children[parent][-1]:
            self._remove(parent, token)

    def _law(self, parent: int) -> np.ndarray:
        if parent not in self._laws:
            assert self._probs is not None, (
                "a drawn node without the distribution it was drawn from"
            )
            self._laws[parent] = self._probs[parent].astype(self.weights.dtype)  # a copy
        return self._laws[parent]

    def _remove(self, parent: int, token: int) -> None:
        """The next sibling was drawn from what is left."""
        if self._probs is None or self._replacement:
            return
        law = self._law(parent)
        law[token] = 0
        total = law.sum()
        if total > 0:
            law /= total


Judge = Callable[[RowResiduals], dict[int, float]]  # -> the coin of every node


def row_by_row(target_probs: Tensor, draft: Draft, judge: Judge) -> tuple[Tensor, Tensor]:
    """The results of `multi_round` and `traverse`, from `judge` on every row: coins (B, N) and
    weights (B, N+1, V)."""
    weights = target_probs.clone()
    keep = torch.zeros_like(weights[:, 1:, 0])
    for row in range(draft.num_rows):
        coins = judge(RowResiduals(weights[row].numpy(), draft, row))
        if coins:
            keep[row, list(coins)] = torch.tensor(list(coins.values()), dtype=keep.dtype)
    return keep, weights


def judge_top_down(residuals: RowResiduals) -> dict[int, float]:
    """Multi-round: siblings in order."""
    coins = {}
    for node in sorted(node for siblings in residuals.children for node in siblings):
        coins[node] = min(residuals.ratio(node), 1.0)
        residuals.reject(node)
    return coins


def judge_leaves_first(residuals: RowResiduals) -> dict[int, float]:
    """Traversal: depth first, a node when its subtree is exhausted."""
    coins: dict[int, float] = {}

    def visit(output: int) -> None:
        for node in residuals.children[output]:
            weight = min(residuals.ratio(node), 1.0)
            residuals.mass[node + 1] = weight
            residuals.weights[node + 1] *= weight
            visit(node + 1)
            coins[node] = float(residuals.mass[node + 1])
            residuals.reject(node)

    visit(0)
    return coins
