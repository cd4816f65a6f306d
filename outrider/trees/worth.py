"""How often a placed node is kept if its parent was, by the probability that the draft gave it.

A best-first tree ranks nodes by the product of the draft's probabilities along their paths, as if
the target drew from the draft's distribution. It does not. With a greedy target, a first guess of
probability 0.5 may be kept nine times in ten, and a second one of 0.3 once in twenty. A tree that
trusts the probabilities then spends its nodes on siblings where a deeper chain would have been
kept. So kept and lost nodes are counted in every step, and the products use these shares.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of the classes of probabilities
TRUST = 4.0  # nodes of a class that its probabilities themselves count for


class NodeWorth:
    """Counts by class of probability, of first children and of later ones."""

    def __init__(self) -> None:
        classes = len(EDGES) + 1
        self._kept = [[0] * classes, [0] * classes]
        self._seen = [[0] * classes, [0] * classes]

    def __call__(self, rank: int, prob: float) -> float:
        """P(kept | its parent is) of a child placed as number `rank` (from 0), that the draft gives
        `prob`."""
        later = int(rank > 0)
        which = bisect(EDGES, prob)
        return (self._kept[later][which] + TRUST * prob) / (self._seen[later][which] + TRUST)

    def count(self, rank: int, prob: float, kept: bool) -> None:
        """Count a child whose parent was kept: kept or lost."""
        later = int(rank > 0)
        which = bisect(EDGES, prob)
        self._seen[later][which] += 1
        self._kept[later][which] += kept


def draft_prob(rank: int, prob: float) -> float:
    """The draft's own probability."""
    return prob


def choices(
    children: Sequence[Sequence[int]], path: Sequence[int]
) -> list[tuple[Sequence[int], int | None]]:
    """For the pending token and each kept node: its children, and which was kept. `children[1 + n]`
    are those of node n."""
    return [
        (children[output + 1], chosen)
        for output, chosen in zip([-1, *path], [*path, None], strict=True)
    ]
