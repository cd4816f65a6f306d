"""Sequoia's dynamic programme: the tree with the most expected accepted tokens for a number of nodes.

Source: Chen et al. 2402.12374, section 4.1. Given acceptance[b], the probability that of a node's children the b-th is the
one that is kept, a tree's expected number of accepted tokens is the sum over its nodes of the product of acceptance along
the path. T(m, d) is the best such sum, 1 for the root included, of a tree of m nodes and at most d levels:

    T(m, d) = 1 + max over m_1 + m_2 + ... = m - 1, the nodes given to each child, of sum_b acceptance[b] T(m_b, d - 1)

solved child by child. It holds for any order of the probabilities; with falling ones it finds what best-first search does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from outrider.trees.shape import TreeShape

Split = tuple[int, ...]  # nodes given to each child, itself included


def sequoia_shape(acceptance: Sequence[float], num_nodes: int, max_depth: int) -> TreeShape:
    """The best tree of at most `num_nodes` draft nodes and `max_depth` levels."""

    @cache
    def best(nodes: int, depth: int) -> tuple[float, Split]:
        """(expected tokens, how the nodes below are shared out) of a subtree whose root is given."""
        return 1 + share(nodes - 1, depth, 0)[0], share(nodes - 1, depth, 0)[1]

    @cache
    def share(nodes: int, depth: int, child: int) -> tuple[float, Split]:
        """The best use of `nodes` below one node, for its children from `child` on."""
        if nodes == 0 or depth == 0 or child == len(acceptance):
            return 0.0, ()
        options: list[tuple[float, Split]] = [(0.0, ())]
        for given in range(1, nodes + 1):
            rest, split = share(nodes - given, depth, child + 1)
            options.append((acceptance[child] * best(given, depth - 1)[0] + rest, (given, *split)))
        return max(options)

    parents: list[int] = []
    level = [(-1, num_nodes + 1, max_depth)]  # (node, nodes of its subtree, levels left)
    while level:
        following = []
        for parent, nodes, depth in level:
            for given in best(nodes, depth)[1]:
                following.append((len(parents), given, depth - 1))
                parents.append(parent)
        level = following
    return TreeShape(tuple(parents))


def expected_accepted(shape: TreeShape, acceptance: Sequence[float]) -> float:
    """Expected number of accepted draft tokens of a shape under these sibling probabilities."""
    value = [1.0]
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        value.append(value[parent + 1] * (acceptance[rank] if rank < len(acceptance) else 0.0))
    return sum(value[1:])
