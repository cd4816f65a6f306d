"""Traversal verification (Weng et al. 2505.12398), the default for trees: the first node in
post-order whose coin shows heads is kept with its whole path.

On a chain that is block verification, which takes over there: same coins, same verdict, fewer
passes over the vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from outrider.sampling.rng import Purpose, Randomness
from outrider.sampling.traversal import post_order, traverse
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier, check, finish_tree
from outrider.verifiers.block import BlockVerifier


class TraversalVerifier(Verifier):
    name: ClassVar[str] = "traversal"
    lossless: ClassVar[bool] = True
    shape: ClassVar[str] = "tree"

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        check(self, draft, target_probs)
        if draft.parents is None:
            return BlockVerifier().verify(draft, target_probs, rng, positions)
        keep, weights = traverse(target_probs, draft)
        heads = rng.bernoulli(keep, Purpose.ACCEPT, positions).tolist()  # sync: (B, N)
        ends = [
            next((node for node in post_order(tree) if row[node]), -1)
            for tree, row in zip(draft.children, heads, strict=True)
        ]
        return finish_tree(draft, ends, weights, target_probs, rng, positions)
