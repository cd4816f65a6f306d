"""Multi-round rejection of a tree, top down: the children of the kept node in turn, then the
correction.

The rule of SpecInfer, Sequoia and EAGLE in one, whichever way the siblings were chosen; the
reference of `traversal`, which accepts at least as much. On a chain it is the token-level rule.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from outrider.sampling.rng import Purpose, Randomness
from outrider.sampling.tree import multi_round
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier, check, finish_tree


class MultiRoundVerifier(Verifier):
    name: ClassVar[str] = "multi-round"
    lossless: ClassVar[bool] = True
    shape: ClassVar[str] = "tree"

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        check(self, draft, target_probs)
        keep, weights = multi_round(target_probs, draft)
        heads = rng.bernoulli(keep, Purpose.ACCEPT, positions).tolist()  # sync: (B, N)
        ends = [_walk(*row) for row in zip(draft.children, heads, strict=True)]
        return finish_tree(draft, ends, weights, target_probs, rng, positions)


def _walk(children: list[list[int]], heads: list[bool]) -> int:
    """The first child whose coin shows heads, and on from there."""
    end = -1
    while True:
        children_kept = [node for node in children[end + 1] if heads[node]]
        if not children_kept:
            return end
        end = children_kept[0]
