"""The dynamic programme against every tree there is, and against best-first search where that is
right, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.trees.sequoia import sequoia_shape
from outrider.trees.shape import TreeShape

Forest = tuple["Forest", ...]  # the children of one node, in order

FALLING = [(0.6, 0.25, 0.1), (0.9, 0.05, 0.04), (0.4, 0.35, 0.2), (0.7,), (0.5, 0.0)]
# an early sibling may be a step to a good one
OTHER = [(0.1, 0.6, 0.3), (0.0, 0.9), (0.2, 0.2, 0.5), (0.0, 0.0, 1.0)]


def forests(num_nodes: int, depth: int, width: int) -> Iterator[Forest]:
    """Every ordered forest of at most `num_nodes` nodes, `depth` levels and `width` children per
    node, once."""

    def exactly(nodes: int, levels: int, slots: int) -> Iterator[Forest]:
        if nodes == 0:
            yield ()
        elif levels and slots:
            for below in range(nodes):
                for first in exactly(below, levels - 1, width):
                    for rest in exactly(nodes - 1 - below, levels, slots - 1):
                        yield (first, *rest)

    for nodes in range(num_nodes + 1):
        yield from exactly(nodes, depth, width)


def value(forest: Forest, acceptance: tuple[float, ...]) -> float:
    """Expected accepted tokens below a kept node."""
    return sum(
        prob * (1 + value(child, acceptance))
        for prob, child in zip(acceptance, forest, strict=False)
    )


def products(shape: TreeShape, acceptance: tuple[float, ...]) -> list[float]:
    """What every node is worth, largest first."""
    worth = [1.0]
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        worth.append(worth[parent + 1] * acceptance[rank])
    return sorted(worth[1:], reverse=True)


@pytest.mark.parametrize("acceptance", FALLING + OTHER)
@pytest.mark.parametrize(
    ("num_nodes", "max_depth"), [(0, 3), (1, 1), (3, 1), (4, 2), (6, 3), (7, 7)]
)
def test_no_tree_is_better(acceptance: tuple[float, ...], num_nodes: int, max_depth: int) -> None:
    """Catches a level or a node too many or too few, and siblings that get what a greedy choice
    would give them."""
    shape = sequoia_shape(acceptance, num_nodes, max_depth)
    best = max(
        value(forest, acceptance) for forest in forests(num_nodes, max_depth, len(acceptance))
    )
    assert sum(products(shape, acceptance)) == pytest.approx(best)
    assert len(shape) <= num_nodes
    assert shape.depth <= max_depth
    assert max(shape.counts) <= len(acceptance)
    assert list(shape.parents) == sorted(shape.parents)  # level by level, siblings together


def test_all_trees_are_enumerated() -> None:
    """The reference itself: ordered forests of n nodes are counted by the Catalan numbers."""
    assert len(list(forests(6, 6, 6))) == 1 + 1 + 2 + 5 + 14 + 42 + 132
    assert len(set(forests(6, 6, 6))) == 197


@pytest.mark.parametrize("num_nodes", range(1, 13))
@pytest.mark.parametrize("acceptance", [(0.6, 0.25, 0.1), (0.43, 0.31, 0.17)])
def test_with_falling_probabilities_it_is_best_first_search(
    acceptance: tuple[float, ...], num_nodes: int
) -> None:
    """The n largest products of a tree that is wide and deep enough. Several trees may have them:
    0.6 * 0.1 = 0.1 * 0.6."""
    greedy = TreeShape.of_widths([3] * 5).best(num_nodes, acceptance)
    planned = sequoia_shape(acceptance, num_nodes, 5)
    assert len(planned) == num_nodes
    assert products(planned, acceptance) == pytest.approx(products(greedy, acceptance))


def test_large_plans() -> None:
    """Deeper and larger than Python's stack, and more nodes than a short, narrow tree has room for."""
    assert len(sequoia_shape((0.7, 0.12), 300, 1000)) == 300
    assert len(sequoia_shape((0.7, 0.12), 400, 3)) == 2 + 4 + 8
    assert sequoia_shape((), 5, 3) == TreeShape(())


def test_a_poor_first_child_is_the_price_of_a_good_second() -> None:
    """Best-first search would stop at the poor first child."""
    acceptance = (0.1, 0.6)
    assert sequoia_shape(acceptance, 2, 2).parents == (-1, -1)  # 0.1 + 0.6, not 0.1 + 0.1 * 0.1
    assert sequoia_shape(acceptance, 4, 2).parents == (-1, -1, 1, 1)
