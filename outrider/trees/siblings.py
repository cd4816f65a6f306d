"""How often the b-th child of a node is the one that is kept: what Sequoia's programme plans with."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.trees.worth import choices
from outrider.types import Draft, Verdict

PRIOR_WEIGHT = 20  # nodes: how many observations the starting estimate counts for
REFRESH = 256  # observations between two estimates, so that plans do not change with every step


class SiblingAcceptance:
    """Counts by rank, over all rows."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        self._kept = [0] * len(self._prior)
        self._tried = [0] * len(self._prior)
        self._estimate = self._prior
        self._fresh = 0

    def count(self, draft: Draft, verdict: Verdict) -> None:
        """Every node of a kept path chose among its children, and so did the pending token."""
        for children, path, num_accepted in zip(
            draft.children, verdict.lists.path, verdict.lists.num_accepted, strict=True
        ):
            for siblings, chosen in choices(children, path[:num_accepted]):
                self._count_node(siblings, chosen)

    def _count_node(self, siblings: Sequence[int], chosen: int | None) -> None:
        for rank, node in enumerate(siblings[: len(self._prior)]):
            self._tried[rank] += 1
            self._kept[rank] += node == chosen
        self._fresh += bool(siblings)

    def estimate(self) -> tuple[float, ...]:
        """P(the b-th child is the kept one), given that there are that many; renewed every REFRESH
        observations."""
        if self._fresh >= REFRESH:
            self._fresh = 0
            self._estimate = tuple(
                round((kept + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT), 3)
                for kept, tried, prior in zip(self._kept, self._tried, self._prior, strict=True)
            )
        return self._estimate

    def measured(self) -> list[float | None]:
        """The bare frequencies; None where a rank was never tried."""
        return [
            kept / tried if tried else None
            for kept, tried in zip(self._kept, self._tried, strict=True)
        ]
