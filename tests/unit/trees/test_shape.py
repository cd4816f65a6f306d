"""Fixed shapes: their numbers, and cutting one down to a budget."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest

from outrider.errors import ConfigError
from outrider.trees.shape import TreeShape, parse_widths


def test_widths_are_children_per_level() -> None:
    """Catches nodes that are not level by level, and widths counted per level instead of per node."""
    shape = TreeShape.of_widths([2, 3])
    assert shape.parents == (-1, -1, 0, 0, 0, 1, 1, 1)
    assert shape.counts == [2, 3, 3, 0, 0, 0, 0, 0, 0]
    assert shape.ranks == [0, 1, 0, 1, 2, 0, 1, 2]
    assert shape.depth == 2
    assert len(TreeShape.of_widths([4, 2, 1])) == 20


def test_nothing_is_a_shape() -> None:
    """A row that may draft nothing."""
    for shape in (TreeShape(()), TreeShape.parallel(3, 0), TreeShape.of_widths([3]).best(0, [0.5])):
        assert (len(shape), shape.depth, shape.counts) == (0, 0, [0])


@pytest.mark.parametrize(("num_chains", "num_nodes"), [(1, 4), (3, 9), (3, 8), (3, 2), (5, 6)])
def test_parallel_chains_do_not_meet(num_chains: int, num_nodes: int) -> None:
    """Catches chains that branch, more chains than asked for, and lengths that differ by more than
    one."""
    shape = TreeShape.parallel(num_chains, num_nodes)
    assert shape.counts[0] == min(num_chains, num_nodes)
    assert all(count <= 1 for count in shape.counts[1:])
    chain = {}
    length = {}
    for node, parent in enumerate(shape.parents):
        chain[node] = node if parent < 0 else chain[parent]
        length[chain[node]] = length.get(chain[node], 0) + 1
    assert sum(length.values()) == num_nodes
    assert max(length.values()) - min(length.values()) <= 1


@pytest.mark.parametrize(
    "acceptance", [(0.6, 0.25, 0.1), (0.4, 0.39, 0.05), (0.95, 0.02, 0.01), (0.5, 0.0, 0.0)]
)
@pytest.mark.parametrize("widths", [[3, 2, 1], [2, 2, 2]])
def test_best_part_of_a_shape_is_the_best_of_all_parts(
    widths: list[int], acceptance: tuple[float, ...]
) -> None:
    """Against every choice of nodes in which no node lacks its parent or an earlier sibling."""
    shape = TreeShape.of_widths(widths)
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    value = {path: prod(acceptance[rank] for rank in path) for path in paths}

    def is_whole(part: set[tuple[int, ...]]) -> bool:
        before = [path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1) for path in part]
        return all(path == () or path in part for path in before)

    for num_nodes in range(6):
        ours = shape.best(num_nodes, acceptance)
        assert len(ours) == num_nodes
        mine: list[tuple[int, ...]] = []
        for parent, rank in zip(ours.parents, ours.ranks, strict=True):
            mine.append((*(mine[parent] if parent >= 0 else ()), rank))
        best = max(
            sum(value[path] for path in part)
            for part in combinations(paths, num_nodes)
            if is_whole(set(part))
        )
        assert sum(value[path] for path in mine) == pytest.approx(best)
    assert shape.best(len(shape) + 5, acceptance) is shape


@pytest.mark.parametrize("text", ["", "x", "2x", "2x0", "2x-1", "2.5", "2xtwo", "2 x 2"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"widths like 4x2x1, got"):
        parse_widths(text)


def test_widths_are_read() -> None:
    assert parse_widths("4x2x1") == [4, 2, 1]
    assert parse_widths("12") == [12]
