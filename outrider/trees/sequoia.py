"""Sequoia's dynamic programme: the tree with the most expected accepted tokens for a number of
nodes.

Source: Chen et al. 2402.12374, section 4.1. Given acceptance[b], the probability that of a node's
children the b-th is the one that is kept, a tree's expected number of accepted tokens is the sum
over its nodes of the product of acceptance along the path. T(m, d) is the best such sum, 1 for the
root included, of a tree of m nodes and at most d levels:

    T(m, d) = 1 + max over m_1 + m_2 + ... = m - 1, the nodes given to each child, of sum_b
    acceptance[b] T(m_b, d - 1)

solved child by child. It holds for any order of the probabilities; with falling ones it finds what
best-first search does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.trees.shape import TreeShape


def sequoia_shape(acceptance: Sequence[float], num_nodes: int, max_depth: int) -> TreeShape:
    """The best tree of at most `num_nodes` draft nodes and `max_depth` levels."""
    parents: list[int] = []
    level = [(-1, num_nodes)]  # (node, how many nodes are below it)
    for split in reversed(_splits(acceptance, num_nodes, min(max_depth, num_nodes))):
        following = []
        for parent, left in level:
            for given in split:
                if not given[left]:
                    break
                following.append((len(parents), int(given[left]) - 1))
                parents.append(parent)
                left -= int(given[left])
        level = following
    return TreeShape(tuple(parents))


def _splits(acceptance: Sequence[float], num_nodes: int, max_depth: int) -> list[np.ndarray]:
    """[d - 1][b, n]: below a node with d levels, how many of n nodes child b gets, the rest being
    for its later siblings."""
    nodes = np.arange(num_nodes + 1)
    rest = nodes[:, None] - nodes  # [n, given]
    impossible = (rest < 0) | (nodes == 0)
    below = np.zeros(num_nodes + 1)  # [n]: the best sum of n nodes below one node; no level, no sum
    splits = []
    for _ in range(max_depth):
        subtree = 1 + np.roll(below, 1)  # [given]: T, the child itself and the nodes below it
        # share[n]: the best sum of n nodes among the children from b on
        split = []
        share = np.zeros(num_nodes + 1)
        for prob in reversed(acceptance):
            sums = np.where(impossible, -1.0, prob * subtree + share[rest])
            given = num_nodes - sums[:, ::-1].argmax(axis=1)  # among equals the largest
            share = sums.max(axis=1)
            share[0] = given[0] = 0
            split.append(given)
        below = share
        splits.append(np.array(split[::-1]))
    return splits
