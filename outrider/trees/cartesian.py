"""Medusa's trees: the paths most likely to be accepted, of all combinations of the heads' guesses
(Cai et al. 2401.10774).

Head d's guess of rank r is right with probability accuracy[d][r], whatever the others guess; the
value of a path is the product along it. The best n paths that are closed under "parent of" and
"earlier sibling of" make the tree. Unlike Sequoia's programme (`sequoia.py`) every level has its
own numbers: later heads are right less often.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from outrider.trees.shape import TreeShape

Path = tuple[int, ...]  # the ranks along it


@lru_cache(maxsize=256)
def cartesian_shape(accuracies: tuple[tuple[float, ...], ...], num_nodes: int) -> TreeShape:
    """The best tree of at most `num_nodes` nodes and one level per head. Accuracies are measured,
    so a rank may by chance do better than the one before it; ranks are tried in order all the same,
    so each level's numbers are put in falling order."""
    levels = [sorted(line, reverse=True) for line in accuracies]
    chosen: list[Path] = []
    waiting: list[tuple[float, Path]] = []
    _offer(waiting, levels, 1.0, ())
    while waiting and len(chosen) < num_nodes:
        minus_value, path = heapq.heappop(waiting)
        chosen.append(path)
        before = -minus_value / levels[len(path) - 1][path[-1]]
        _offer(waiting, levels, before, path[:-1], path[-1] + 1)
        _offer(waiting, levels, -minus_value, path)
    # level by level, siblings together and in rank order
    chosen.sort(key=lambda path: (len(path), path))
    number = {(): -1} | {path: node for node, path in enumerate(chosen)}
    return TreeShape(tuple(number[path[:-1]] for path in chosen))


def _offer(
    waiting: list[tuple[float, Path]],
    levels: Sequence[Sequence[float]],
    value: float,
    path: Path,
    rank: int = 0,
) -> None:
    """Put the child of rank `rank` of a path on the heap, if there is one that can be right."""
    if len(path) < len(levels) and rank < len(levels[len(path)]) and levels[len(path)][rank] > 0:
        heapq.heappush(waiting, (-value * levels[len(path)][rank], (*path, rank)))
