"""How many draft nodes will be kept, estimated while running from verdicts alone.

A node's share is how often it was kept among the steps that asked for it. A node that was rarely
asked for leans on the node before it. Everything fades with every step, also what is not seen at
present: a length given up long ago gets another chance. Only counts of earlier steps enter, never
the value of a token that is about to be proposed (non-anticipation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

DECAY = 0.98  # per step, however many rows it has: a memory of some 50 steps
# conditional acceptance before anything was seen, and the tokens it counts for; what was seen never
# fades to fewer
PRIOR = 0.7
PRIOR_WEIGHT = 2.0
NODE_LEAN = 5.0  # kept nodes that the guess from the node before counts for
# share of steps in which the node before counts as kept: rarer ones would make a guess of too much
# weight
MIN_SHARE = 0.1
NOTHING = 1e-6  # weight of a prior that has faded
# tokens of a text, prompt included: each doubling from here on has estimates of its own
LONG = 1024


@dataclass
class FadingMean:
    """A fading mean: `kept` of `tried`."""

    kept: float = 0.0
    tried: float = 0.0

    def add(self, kept: float, tried: float, decay: float = DECAY) -> None:
        self.kept = decay * self.kept + kept
        self.tried = decay * self.tried + tried

    def mean(self, prior: float, weight: float) -> float:
        """`prior` counts for `weight` tries."""
        return (self.kept + weight * prior) / (self.tried + weight)


@dataclass
class Shares:
    """How often each position of a draft was tried, and kept of that; fading."""

    kept: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)

    def fade(self, steps: int = 1, floor: float = 0.0) -> None:
        """This many steps have passed. The first position keeps at least `floor` tries."""
        factor = DECAY**steps
        if floor:
            factor = max(factor, min(1.0, floor / self.tried[0]))
        self.kept = [factor * value for value in self.kept]
        self.tried = [factor * value for value in self.tried]

    def add(self, num_tried: int, kept: Iterable[float]) -> None:
        """This many positions were tried; `kept` says for the first of them whether, or how often,
        each was kept."""
        missing = [0.0] * (num_tried - len(self.tried))
        self.kept += missing
        self.tried += missing
        for position in range(num_tried):
            self.tried[position] += 1
        for position, count in enumerate(kept):
            self.kept[position] += count

    def counts(self, length: int) -> list[tuple[float, float]]:
        """How often each of the first `length` positions was kept, and tried."""
        unseen = [0.0] * (length - len(self.tried))
        return list(zip(self.kept[:length] + unseen, self.tried[:length] + unseen, strict=True))


class KeptNodes:
    """Expected kept nodes of a chain or tree by how many are asked for: the sum of its nodes'
    shares."""

    def __init__(self) -> None:
        self._nodes = Shares([PRIOR * PRIOR_WEIGHT], [PRIOR_WEIGHT])

    def fade(self, steps: int) -> None:
        """This many steps have passed. However many these are, what was seen counts for as much as
        the prior did: else one kept node after a long pause would be all that is known."""
        self._nodes.fade(steps, PRIOR_WEIGHT)

    def observe(self, asked: int, accepted: int, budgets: Sequence[int] | None) -> None:
        """One row asked for this many nodes and `accepted` were kept. `budgets`: how much must be
        asked for to get each of these; None: unknown, then kept nodes grow like the logarithm of
        the tree."""
        if budgets is None:
            share = accepted / math.log(asked + 1)
            self._nodes.add(
                asked, [share * math.log((node + 1) / node) for node in range(1, asked + 1)]
            )
        else:
            self._nodes.add(asked, [budgets.count(node) for node in range(1, asked + 1)])

    def expected(self, max_nodes: int) -> list[float]:
        """Kept nodes where 0, 1, ... `max_nodes` are asked for. From node to node the share falls
        as it did before, but no faster than in a tree whose kept nodes grow like the logarithm."""
        share = 1.0
        ratio = PRIOR
        sums = [0.0]
        for node, (kept, tried) in enumerate(self._nodes.counts(max_nodes)):
            weight = NODE_LEAN / max(share, MIN_SHARE) if node else NOTHING
            guess = max(ratio, node / (node + 1)) * share
            before = share
            share = (kept + weight * guess) / (tried + weight)
            ratio = min(share / before, 1.0) if before else 0.0
            sums.append(sums[-1] + share)
        return sums


class Phase(NamedTuple):
    """The part of a text that a row is in."""

    thinks: bool = False  # inside its thoughts
    doublings: int = 0  # of its text's length, the one to LONG tokens the first

    @classmethod
    def at(cls, length: int, *, thinks: bool) -> Phase:
        """After this many tokens."""
        return cls(thinks, (length // LONG).bit_length())


class ByPhase(Generic[T]):
    """The survival estimates of each phase, kept apart."""

    def __init__(self, new: Callable[[], T]) -> None:
        self._new = new
        self._known: dict[Phase, T] = {}

    def of(self, phase: Phase) -> T:
        """The estimate of a phase: at first that of the nearest length of text that was seen."""
        if phase not in self._known:
            seen = [other for other in self._known if other.thinks == phase.thinks]
            nearest = min(
                seen, key=lambda other: abs(other.doublings - phase.doublings), default=None
            )
            self._known[phase] = self._new() if nearest is None else deepcopy(self._known[nearest])
        return self._known[phase]
