"""Verification of a tree, top down: try the children of the kept node one after another, in the
order they were drawn.

A child x drawn from q is kept w.p. min(1, p(x)/q(x)); after a rejection p becomes norm([p - q]+)
and the next sibling is tried against that. Sources, one rule per way of choosing siblings:

    drawn independently (`Draft.replacement`)    q stays                          SpecInfer, Miao et al. 2305.09781
    drawn without replacement                    q loses x and is renormalised    Sequoia, Chen et al. 2402.12374
    placed deterministically                     q is a point mass: p loses x     EAGLE 2401.15077; the hybrid 2502.18779

On a chain it is token-level rejection. As everywhere nothing is random here: `multi_round` gives
the probability of each coin and the weights of each correction, supposing that the walk gets there.
docs/algorithms/trees.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.sampling.tree_rows import FEW_ROWS, judge_top_down, row_by_row
from outrider.types import Draft


class Residuals:
    """The mass left to each output while siblings are rejected one after another, for all rows at
    once.

    `weights[b, 1 + n]` is a * p: the law after node n (output 0: after the pending token), less the
    mass of its rejected children, times `mass[b, 1 + n]` = a, the path's weight (always 1 in
    top-down verification).
    """

    def __init__(self, target_probs: Tensor, draft: Draft) -> None:
        self.weights = target_probs.clone()  # (B, N+1, V)
        self.mass = torch.ones_like(target_probs[:, :, 0])  # (B, N+1)
        self._draft = draft
        self._parents = draft.parent_nodes() + 1  # output index of each node's parent
        drawn = draft.sampled is None or bool(draft.sampled.any())
        self._laws = (
            draft.probs.to(target_probs.dtype, copy=True)
            if draft.probs is not None and drawn
            else None
        )

    def ratio(self, rows: Tensor, node: Tensor) -> Tensor:
        """a p(x)/q(x) of one node of each of these rows: (R,), (R,) -> (R,)."""
        token = self._draft.tokens[rows, node]
        parent = self._parents[rows, node]
        wanted = self.weights[rows, parent, token]
        if self._laws is None:
            return wanted
        proposed = self._laws[rows, parent, token]
        if self._draft.sampled is not None:
            proposed = proposed.masked_fill(~self._draft.sampled[rows, node], 1)
        return wanted / proposed.clamp(min=torch.finfo(wanted.dtype).tiny)

    def reject(self, rows: Tensor, node: Tensor) -> None:
        """Reject the nodes (R,) of these rows: their parents now stand for [a p - q]+, rescaled to
        mass S / (S + 1 - a)."""
        token = self._draft.tokens[rows, node, None]
        parent = self._parents[rows, node]
        before = self.weights[rows, parent]
        mass = self.mass[rows, parent]
        residual = self._minus_proposal(before, rows, node, parent, token)
        total = residual.sum(dim=-1)
        scale = total + (1 - mass)
        # 0: q covers all of p, so this child is kept with certainty and what would come after it
        # does not matter
        possible = scale > 0
        safe = scale.masked_fill(~possible, 1)
        self.weights[rows, parent] = torch.where(
            possible[:, None], residual / safe[:, None], before
        )
        self.mass[rows, parent] = torch.where(possible, total / safe, mass)

    def _minus_proposal(
        self, before: Tensor, rows: Tensor, node: Tensor, parent: Tensor, token: Tensor
    ) -> Tensor:
        without = before.scatter(-1, token, 0)  # minus a point mass: a p(x) <= 1
        if self._laws is None:
            return without
        law = self._laws[rows, parent]
        residual = (before - law).clamp_(min=0)
        if self._draft.sampled is not None:
            residual = torch.where(self._draft.sampled[rows, node, None], residual, without)
        if not self._draft.replacement:  # the next sibling was drawn from what is left
            rest = law.scatter_(-1, token, 0)
            total = rest.sum(dim=-1, keepdim=True)  # perhaps a denormal
            self._laws[rows, parent] = rest / total.masked_fill(total == 0, 1)
        return residual


def multi_round(target_probs: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Each node's probability of being kept, and each output's weights of the token that ends the
    step there.

    The probabilities (B, N) hold once the parent is kept and earlier siblings are not; the weights
    are (B, N+1, V), with mass 0 where no step ends.
    """
    if target_probs.device.type == "cpu" and draft.num_rows <= FEW_ROWS:
        return row_by_row(target_probs, draft, judge_top_down)
    return multi_round_batched(target_probs, draft)


def multi_round_batched(target_probs: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """`multi_round` of all rows at once."""
    residuals = Residuals(target_probs, draft)
    keep = torch.zeros_like(residuals.mass[:, 1:])
    every_row = torch.arange(draft.num_rows, device=draft.tokens.device)
    for number in range(draft.num_nodes):  # siblings stand in the order they were drawn
        rows = every_row[draft.lengths > number]
        node = torch.full_like(rows, number)
        keep[rows, number] = residuals.ratio(rows, node).clamp(max=1)
        residuals.reject(rows, node)
    return keep, residuals.weights
