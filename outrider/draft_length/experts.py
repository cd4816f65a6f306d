"""Distinct experts of a pass by how many nodes it verifies, learned from passes.

Tokens of one text share experts, more in code than in prose. With D(n) the distinct experts of a
layer in a pass that verifies n nodes in its widest row,

    D(n) = D(0) (1 + n)^p(n)        p = 0: all tokens share theirs; p = 1: none shares any

p is a number of the text at hand plus one of each n, as experts run out. So a text that shares more
in passes of four nodes is expected to share more in those of eight, too.
"""

from __future__ import annotations

import math

from outrider.draft_length.survival import DECAY, PRIOR_WEIGHT, FadingMean

SHARING = 0.7  # p before anything was seen


class ExpertsByNodes:
    """Passes of one number of rows."""

    def __init__(self) -> None:
        self._plain = FadingMean()  # D(0)
        self._sharing = FadingMean()  # p of the text at hand
        self._beyond: dict[int, FadingMean] = {}  # by nodes: what p is beyond the text's

    def observe(self, nodes: int, experts: float, count: int = 1) -> None:
        """`count` passes that verified this many nodes read `experts` on average."""
        if nodes == 0 or not self._plain.tried:
            plain = experts / (1 + nodes) ** SHARING
            self._plain.add(count * plain, count, DECAY**count)
        if nodes == 0:
            return
        sharing = math.log(experts / self.plain) / math.log(1 + nodes)
        text = self._text()
        self._sharing.add(count * (sharing - self._beyond_at(nodes)), count, DECAY**count)
        beyond = self._beyond.setdefault(nodes, FadingMean())
        beyond.add(count * (sharing - text), count, DECAY**count)

    def copy(self) -> ExpertsByNodes:
        """A first guess for another number of rows: none but how tokens share."""
        other = ExpertsByNodes()
        other._sharing.add(self._text(), PRIOR_WEIGHT)
        return other

    @property
    def plain(self) -> float:
        """D(0)."""
        return self._plain.mean(0.0, 0.0)

    def expected(self, nodes: int) -> float:
        """D of this many nodes."""
        sharing = min(max(self._text() + self._beyond_at(nodes), 0.0), 1.0)
        return float(self.plain * (1 + nodes) ** sharing)

    def _text(self) -> float:
        return self._sharing.mean(SHARING, PRIOR_WEIGHT)

    def _beyond_at(self, nodes: int) -> float:
        """The p of this many nodes beyond the text's; of a number never seen, the nearest one's."""
        if not self._beyond:
            return 0.0
        nearest = min(self._beyond, key=lambda seen: abs(seen - nodes))
        return self._beyond[nearest].mean(0.0, PRIOR_WEIGHT)
