"""Which nodes of a tree are worth what verifying them costs.

A pass of a mixture of experts costs by the experts that its tokens name, so a node that is seldom
kept may cost more than it brings, and the first nodes of a draft the most: they name experts that
nobody has read yet. As in EcoSpec (2607.12696) nodes are taken by expected tokens per cost; the
verdict is the same for any tree of placed nodes, so texts stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def paying(values: Sequence[float], prices: Sequence[float]) -> list[int]:
    """The nodes that pay, in ascending order: the best n, where their sum exceeds its price by the
    most; none where no number does.

    `values`: P(kept) of every node, which only falls along a path; `prices[n]`: tokens that the time
    of verifying n nodes would bring otherwise; empty: every node pays.
    """
    if not prices:
        return list(range(len(values)))
    ranked = sorted(range(len(values)), key=lambda node: (-values[node], node))[: len(prices) - 1]
    sums = accumulate((values[node] for node in ranked), initial=0.0)
    gains = [brought - price for brought, price in zip(sums, prices, strict=False)]
    return sorted(ranked[: gains.index(max(gains))])
