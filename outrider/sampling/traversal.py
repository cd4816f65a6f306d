"""Traversal verification of a tree: leaves first, so that a whole path is judged before any part of
it is given up.

Source: Weng et al. 2505.12398, with siblings drawn in any of the ways of `tree.py`. Every path
carries a weight,

    a(pending) = 1      a(child) = min(1, a(parent) p(x)/q(x))

and the walk goes depth first, first children first. A node whose subtree is exhausted is kept, with
its whole path, w.p. its weight a; if it is not, its parent's law and weight make up for it:

    R = [a p - q]+    S = sum R    a <- S / (S + 1 - a)    p <- R / S    q loses x (unless drawn with replacement)

Where the walk goes depends on the tree alone, so all coins can be tossed beforehand; the first
heads in post-order wins. On a chain that is block verification, number for number; with
deterministic siblings only it has the law of top-down verification. docs/algorithms/trees.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.sampling.tree import Residuals
from outrider.sampling.tree_rows import FEW_ROWS, judge_leaves_first, row_by_row
from outrider.types import Draft


def traverse(target_probs: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Each node's probability that its coin shows heads, and each output's weights of the token
    that ends the step there.

    The probabilities are (B, N), 0 beyond a row's length; the weights (B, N+1, V), with mass 0
    where no step ends.
    """
    if target_probs.device.type == "cpu" and draft.num_rows <= FEW_ROWS:
        return row_by_row(target_probs, draft, judge_leaves_first)
    return traverse_batched(target_probs, draft)


def traverse_batched(target_probs: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """`traverse` of all rows at once."""
    residuals = Residuals(target_probs, draft)
    keep = torch.zeros_like(residuals.mass[:, 1:])
    device = draft.tokens.device
    walks = [
        _walk(tree, length) for tree, length in zip(draft.children, draft.lists[1], strict=True)
    ]
    for number in range(max((len(walk) for walk in walks), default=0)):
        turn = [(row, walk[number]) for row, walk in enumerate(walks) if number < len(walk)]
        entering = [(row, node) for row, (node, is_done) in turn if not is_done]
        leaving = [(row, node) for row, (node, is_done) in turn if is_done]
        if entering:
            rows, node = torch.tensor(entering, device=device).unbind(1)
            weight = residuals.ratio(rows, node).clamp(max=1)
            residuals.mass[rows, node + 1] = weight
            residuals.weights[rows, node + 1] *= weight[:, None]
        if leaving:
            rows, node = torch.tensor(leaving, device=device).unbind(1)
            keep[rows, node] = residuals.mass[rows, node + 1]
            residuals.reject(rows, node)
    return keep, residuals.weights


def _walk(children: list[list[int]], length: int) -> list[tuple[int, bool]]:
    """Depth first: (node, False) on the way down, (node, True) when its subtree is exhausted."""
    events: list[tuple[int, bool]] = []
    stack = [(node, False) for node in reversed(children[0])]
    while stack:
        node, is_done = stack.pop()
        events.append((node, is_done))
        if not is_done:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children[node + 1])]
    assert len(events) == 2 * length, "a node without a parent in the tree"
    return events


def post_order(children: list[list[int]]) -> list[int]:
    """Nodes of one row in the order in which `traverse` judges them."""
    return [node for node, is_done in _walk(children, sum(map(len, children))) if is_done]
