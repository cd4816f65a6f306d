"""Growing trees on a distribution that a test knows as a whole."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest

from outrider.trees.growth import BestFirstGrowth, Child, Growth, ShapeGrowth
from outrider.trees.shape import TreeShape

Path = tuple[int, ...]


class KnownProbs:
    """Random distributions over a few tokens, one for every text."""

    def __init__(self, seed: int, num_tokens: int) -> None:
        self.seed = seed
        self.num_tokens = num_tokens

    def after(self, path: Path) -> list[float]:
        rng = np.random.default_rng([self.seed, *(token + 1 for token in path)])
        return rng.dirichlet(np.full(self.num_tokens, 0.7)).tolist()

    def likeliest(self, path: Path, count: int) -> list[Child]:
        probs = self.after(path)
        return [
            Child(token, probs[token])
            for token in sorted(range(len(probs)), key=lambda t: -probs[t])[:count]
        ]

    def value(self, path: Path) -> float:
        return prod(self.after(path[:depth])[path[depth]] for depth in range(len(path)))


def path_of(growth: Growth, node: int) -> Path:
    return () if node < 0 else (*path_of(growth, growth.parents[node]), growth.tokens[node])


def grow(growth: Growth, probs: KnownProbs) -> int:
    """Give it what it wants; returns the number of levels."""
    levels = 0
    while wanted := growth.wanted():
        growth.add(
            [probs.likeliest(path_of(growth, output - 1), count) for output, count in wanted]
        )
        levels += 1
    return levels


def explored(probs: KnownProbs, top_k: int, max_depth: int) -> list[list[Path]]:
    """EAGLE-2 on paper: per level, the `top_k` children of each of the `top_k` best nodes of the
    level above."""
    levels = []
    frontier = [()]
    for _ in range(max_depth):
        level = [
            (*path, child.token) for path in frontier for child in probs.likeliest(path, top_k)
        ]
        frontier = sorted(level, key=lambda path: -probs.value(path))[:top_k]
        levels.append(level)
    return levels


def best(probs: KnownProbs, levels: list[list[Path]], num_nodes: int) -> list[Path]:
    return sorted(
        (path for level in levels for path in level), key=lambda path: -probs.value(path)
    )[:num_nodes]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("num_nodes", "top_k", "max_depth"), [(1, 4, 4), (5, 2, 6), (12, 3, 4), (30, 4, 3), (8, 8, 3)]
)
def test_best_first_takes_the_largest_products_of_what_it_saw(
    seed: int, num_nodes: int, top_k: int, max_depth: int
) -> None:
    """Catches a frontier of the wrong nodes, products along the wrong path, and a node chosen
    without its ancestors."""
    probs = KnownProbs(seed, 5)
    growth = BestFirstGrowth(num_nodes, top_k, max_depth, min_gain=0.0)
    grow(growth, probs)
    chosen = growth.finish()
    levels = explored(probs, min(top_k, num_nodes), min(max_depth, num_nodes))
    assert {path_of(growth, node) for node in chosen} == set(best(probs, levels, num_nodes))
    assert chosen == sorted(chosen)
    assert all(growth.parents[node] in {-1, *chosen} for node in chosen)


@pytest.mark.parametrize("seed", range(5))
def test_wide_enough_it_takes_the_largest_products_of_all(seed: int) -> None:
    """With nothing cut off, EAGLE-2's tree maximises the expected number of accepted tokens."""
    probs = KnownProbs(seed, 2)
    growth = BestFirstGrowth(8, 8, 3, min_gain=0.0)
    grow(growth, probs)
    everything = [[(a,), (a, b), (a, b, c)] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    every_path = [[path] for path in {path for branch in everything for path in branch}]
    assert {path_of(growth, node) for node in growth.finish()} == set(best(probs, every_path, 8))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("min_gain", [0.1, 0.3])
def test_it_stops_when_a_level_adds_too_little(seed: int, min_gain: float) -> None:
    """OPT-Tree: the gain is that of the best n nodes, not the level's own sum, and the last level
    still counts."""
    probs = KnownProbs(seed, 4)
    num_nodes = 6
    top_k = 3
    max_depth = 6
    levels = explored(probs, top_k, max_depth)
    sums = [
        sum(probs.value(path) for path in best(probs, levels[:depth], num_nodes))
        for depth in range(max_depth + 1)
    ]
    gains = [after - before for before, after in pairwise(sums)]
    expected = next((depth + 1 for depth, gain in enumerate(gains) if gain < min_gain), max_depth)
    growth = BestFirstGrowth(num_nodes, top_k, max_depth, min_gain)
    assert grow(growth, probs) == expected
    assert {path_of(growth, node) for node in growth.finish()} == set(
        best(probs, levels[:expected], num_nodes)
    )


def test_it_is_never_deeper_than_its_nodes() -> None:
    """Two nodes need two levels of drafting, not eight."""
    growth = BestFirstGrowth(2, 4, 8, min_gain=0.0)
    assert grow(growth, KnownProbs(0, 5)) == 2


def test_impossible_nodes_are_not_drafted() -> None:
    """A distribution with one token left (top-k 1, greedy) makes a chain, however large the budget."""
    growth = BestFirstGrowth(6, 3, 2, min_gain=0.0)
    growth.add([[Child(4, 1.0), Child(0, 0.0), Child(1, 0.0)]])
    growth.add([[Child(7, 1.0), Child(0, 0.0)] for _ in growth.wanted()])
    assert [path_of(growth, node) for node in growth.finish()] == [(4,), (4, 7)]


def test_a_shape_is_grown_as_it_is() -> None:
    """Catches levels mixed up, children under the wrong node, and a lost mark of what was drawn."""
    growth = ShapeGrowth(TreeShape((-1, -1, 1, 1, 2)))
    assert growth.wanted() == [(0, 2)]
    growth.add([[Child(5, 0.1, drawn=True), Child(6, 0.2)]])
    assert growth.wanted() == [(2, 2)]
    growth.add([[Child(7, 0.3, drawn=True), Child(8, 0.1, drawn=True)]])
    assert growth.wanted() == [(3, 1)]
    growth.add([[Child(9, 0.9)]])
    assert growth.wanted() == []
    assert (growth.tokens, growth.parents) == ([5, 6, 7, 8, 9], [-1, -1, 1, 1, 2])
    assert growth.drawn == [True, False, True, True, False]
    assert growth.finish() == [0, 1, 2, 3, 4]


def test_an_empty_shape_wants_nothing() -> None:
    growth = ShapeGrowth(TreeShape(()))
    assert (growth.wanted(), growth.finish()) == ([], [])
