"""One row's draft tree while a model drafts it, level by level.

A growth names the outputs after which it wants children, and how many (`wanted`). It receives them
(`add`), and at the end selects the nodes that belong to the draft (`finish`). Two kinds:

* `ShapeGrowth`: a shape that is fixed in advance. For SAMPLED nodes this is the only kind: choosing
  among drawn nodes by
  their own scores would bias the output.
* `BestFirstGrowth`: deterministic nodes, the likeliest paths of the draft's own distribution.
  EAGLE-2 (Li et al. 2406.16858):
  every level expands the `top_k` best nodes of the level above, all nodes are remembered, and the
  best `num_nodes` of all make the tree; OPT-Tree (Wang et al. 2406.17276): it stops growing deeper
  once a level adds less than `min_gain` expected accepted tokens. Both rank a node by the product
  of the draft's probabilities along its path; with `adapt` by how often nodes of such probabilities
  were kept (`worth.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.trees.paying import paying
from outrider.trees.shape import TreeShape
from outrider.trees.worth import draft_prob


@dataclass(frozen=True)
class Child:
    """A candidate node. `prob`: its share of its parent's distribution; `drawn`: sampled from it
    rather than placed."""

    token: int
    prob: float
    drawn: bool = False


class Growth(Protocol):
    """Nodes are numbered as they are added; output 0 follows the pending token, output 1 + n node
    n."""

    tokens: list[int]
    parents: list[int]

    def wanted(self) -> list[tuple[int, int]]:
        """(output, how many children) of this level; empty when the tree is complete."""

    def add(self, children: list[list[Child]]) -> None:
        """The children of every wanted output, in the order of `wanted`."""

    def finish(self) -> list[int]:
        """Nodes of the draft, in ascending order: parents before children."""


class ShapeGrowth:
    """Grows exactly the given shape."""

    def __init__(self, shape: TreeShape) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.drawn: list[bool] = []
        self._counts = shape.counts
        self._level = [0]  # outputs whose children come next

    def wanted(self) -> list[tuple[int, int]]:
        return [(output, self._counts[output]) for output in self._level if self._counts[output]]

    def add(self, children: list[list[Child]]) -> None:
        first = len(self.tokens)
        for (output, _), siblings in zip(self.wanted(), children, strict=True):
            self.tokens += [child.token for child in siblings]
            self.drawn += [child.drawn for child in siblings]
            self.parents += [output - 1] * len(siblings)
        self._level = list(range(first + 1, len(self.tokens) + 1))

    def finish(self) -> list[int]:
        return list(range(len(self.tokens)))


class BestFirstGrowth:
    """Grows where acceptance is likeliest. `num_nodes` >= 1. `worth`: P(kept | its parent is) of a
    child, by its rank among its siblings and the draft's probability; `prices`: see `paying`."""

    def __init__(
        self,
        num_nodes: int,
        top_k: int,
        max_depth: int,
        min_gain: float,
        worth: Callable[[int, float], float] = draft_prob,
        prices: Sequence[float] = (),
    ) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.ranked_probs: list[tuple[int, float]] = []  # of every node: rank and probability
        self._worth = worth
        self._prices = prices
        self._value = [1.0]  # of every output: product of what the nodes of its path are worth
        self._num_nodes = num_nodes
        self._top_k = min(top_k, num_nodes)
        self._levels_left = min(max_depth, num_nodes)
        self._min_gain = min_gain
        self._frontier = [0]

    def wanted(self) -> list[tuple[int, int]]:
        return [(output, self._top_k) for output in self._frontier] if self._levels_left else []

    def add(self, children: list[list[Child]]) -> None:
        before = self._best_sum()
        first = len(self.tokens)
        for output, siblings in zip(self._frontier, children, strict=True):
            for rank, child in enumerate(siblings):
                self.tokens.append(child.token)
                self.parents.append(output - 1)
                self.ranked_probs.append((rank, child.prob))
                self._value.append(
                    self._value[output] * self._worth(rank, child.prob) if child.prob > 0 else 0.0
                )
        level = range(first + 1, len(self.tokens) + 1)
        ranked = sorted(level, key=lambda output: (-self._value[output], output))
        self._frontier = sorted(ranked[: self._top_k])
        self._levels_left -= 1
        if self._best_sum() - before < self._min_gain:
            self._levels_left = 0

    def finish(self) -> list[int]:
        nodes = sorted(self._best_nodes())
        kept = paying([self._value[node + 1] for node in nodes], self._prices)
        return [nodes[index] for index in kept]

    def _best_nodes(self) -> list[int]:
        # a path's value only falls and ties go to the earlier node, so a chosen node's ancestors
        # are chosen, too
        possible = [node for node in range(len(self.tokens)) if self._value[node + 1] > 0]
        return sorted(possible, key=lambda node: (-self._value[node + 1], node))[: self._num_nodes]

    def _best_sum(self) -> float:
        """Expected accepted tokens of the best `num_nodes` so far."""
        return sum(self._value[node + 1] for node in self._best_nodes())
