"""Nodes that pay: by hand, against every number of nodes, and with their ancestors."""

from __future__ import annotations

import random

import pytest

from outrider.trees.growth import BestFirstGrowth, Child
from outrider.trees.paying import paying


def test_by_hand() -> None:
    """The first node costs most. One of 0.6 alone is not worth 0.7; with one of 0.5 it is."""
    prices = [0.0, 0.7, 0.9, 1.3]
    assert paying([0.6], prices) == []
    assert paying([0.6, 0.5], prices) == [0, 1]
    assert paying([0.2, 0.6, 0.5], prices) == [1, 2]
    assert paying([0.9, 0.1, 0.1], prices) == [0]
    assert paying([0.2, 0.1], []) == [0, 1], "without prices all pay"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_number_of_nodes_gains_more(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.random() for _ in range(8)]
    prices = [0.0]
    for _ in range(8):
        prices.append(prices[-1] + rng.random() * 0.8)
    kept = paying(values, prices)
    best = sorted(values, reverse=True)
    gains = [sum(best[:count]) - prices[count] for count in range(9)]
    assert sum(values[node] for node in kept) - prices[len(kept)] == pytest.approx(max(gains))
    assert kept == sorted(kept)


def test_a_tree_keeps_the_ancestors_of_what_pays() -> None:
    growth = BestFirstGrowth(6, 2, 3, 0.0, prices=[0.0, 0.5, 0.6, 0.7, 1.2, 1.7, 2.2])
    growth.add([[Child(1, 0.9), Child(2, 0.1)]])
    growth.add([[Child(3, 0.8), Child(4, 0.2)], [Child(5, 0.9), Child(6, 0.1)]])
    kept = growth.finish()
    assert [growth.tokens[node] for node in kept] == [1, 3, 4]
    assert all(growth.parents[node] in (-1, *kept) for node in kept)
