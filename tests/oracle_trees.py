"""The oracle of exact distributions for trees: every tree a drafter can draw, with its probability,
through the real verifiers.

The implementation is in tests/enumeration/; these are the names under which the tests know it.
"""

from __future__ import annotations

from torch import Tensor

from outrider.types import Draft
from tests.enumeration.enumerate import bias
from tests.enumeration.tables import Growth, Nodes, TableModel, shape, tree_drafts
from tests.oracle import expected_accepted

__all__ = ["Growth", "Nodes", "probs_on", "shape", "tree_accepted", "tree_bias", "tree_drafts"]

tree_bias = bias
tree_accepted = expected_accepted


def probs_on(model: TableModel, draft: Draft) -> Tensor:
    """(B, N+1, V): one pass over padded trees."""
    return model.probs_on(draft)
