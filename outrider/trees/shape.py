"""Shapes of draft trees that are fixed before anything is drawn.

    4x2x1        every node of a level has this many children: 4 + 8 + 8 nodes
    parallel:3   three chains side by side, as long as the node budget allows (several drafts at once)

A shape's nodes stand level by level, siblings together and in the order in which they are tried:
rank 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from outrider.errors import ConfigError


@dataclass(frozen=True)
class TreeShape:
    """`parents[n]` of every node, -1 = the pending token; level by level."""

    parents: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def counts(self) -> list[int]:
        """Children of every output: [0] of the pending token, [1 + n] of node n."""
        counts = [0] * (len(self) + 1)
        for parent in self.parents:
            counts[parent + 1] += 1
        return counts

    @cached_property
    def ranks(self) -> list[int]:
        """Rank of every node among its siblings."""
        seen = [0] * (len(self) + 1)
        ranks = []
        for parent in self.parents:
            ranks.append(seen[parent + 1])
            seen[parent + 1] += 1
        return ranks

    @property
    def depth(self) -> int:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return max(depths)

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> TreeShape:
        """Level d: `widths[d]` children for every node of the level above."""
        parents: list[int] = []
        level = [-1]
        for width in widths:
            first = len(parents)
            parents += [parent for parent in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def parallel(cls, num_chains: int, num_nodes: int) -> TreeShape:
        """`num_chains` chains of equal length (the first ones a node longer where it does not
        divide)."""
        return cls(tuple(max(node - num_chains, -1) for node in range(num_nodes)))

    def best(self, num_nodes: int, acceptance: Sequence[float]) -> TreeShape:
        """The part of the shape with the most expected accepted tokens, when a node of rank r is
        kept w.p. acceptance[r]."""
        if num_nodes >= len(self):
            return self
        value = [1.0]
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            value.append(value[parent + 1] * acceptance[min(rank, len(acceptance) - 1)])
        # non-increasing in rank, so a chosen node's parent and earlier siblings are chosen, too
        chosen = sorted(
            sorted(range(len(self)), key=lambda node: (-value[node + 1], node))[:num_nodes]
        )
        number = {-1: -1} | {node: index for index, node in enumerate(chosen)}
        return TreeShape(tuple(number[self.parents[node]] for node in chosen))


def parse_widths(text: str) -> list[int]:
    """'4x2x1' -> [4, 2, 1]. Raises ConfigError."""
    parts = text.split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"a tree shape is widths like 4x2x1, got '{text}'")
    return [int(part) for part in parts]
