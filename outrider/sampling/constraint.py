"""The tokens that a grammar allows after a text: one object per row, fed with every committed
token.

One object answers for every node of a draft, given the path from the committed text to the node.
Asking must not change it; only committed tokens do. So target and drafters read one mask, and the
law of a constrained row stays a function of that row alone: docs/algorithms/distribution.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from outrider.types import Draft


class Constraint(Protocol):
    """Implemented by grammars (`outrider/grammar/`)."""

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """(len(paths), V) bool: what may follow committed + path. All True where the path itself
        breaks the rule, or continues after its end, because no text has that path. Never all False.
        """

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """The tokens that spell the only continuation of committed + path; none where there are
        several.

        `most`: about how many are asked for. A guess: the text may be spelled in other tokens, or
        have another continuation that no single token shows.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """Record the tokens that were emitted."""

    @property
    def is_over(self) -> bool:
        """Whether the committed text is complete and nothing may follow."""


def path_masks(
    constraints: Sequence[Constraint | None], draft: Draft | None, first_node: int, num_outputs: int
) -> Iterator[tuple[int, Tensor]]:
    """(row, allowed tokens: (m, V) bool on the host) of every row with a constraint, at outputs
    first_node .. of a pass over `draft`; m = num_outputs, or fewer where the rest is padding.
    Without a draft every output follows the committed text.
    """
    for row, constraint in enumerate(constraints):
        paths = [] if constraint is None else _paths(draft, row, first_node, num_outputs)
        if constraint is not None and paths:
            yield row, constraint.allowed(paths)


def _paths(draft: Draft | None, row: int, first_node: int, num_outputs: int) -> list[list[int]]:
    """Draft tokens before each output of one row; none for padding."""
    if draft is None:
        return [[]] * num_outputs
    tokens = draft.lists[0][row]
    parents = draft.parent_lists[row]
    length = draft.lists[1][row]
    paths: list[list[int]] = [[]]
    for node in range(length):  # parents stand before their children
        paths.append([*paths[parents[node] + 1], tokens[node]])
    return paths[first_node : first_node + num_outputs]
