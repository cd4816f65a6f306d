"""One row's tree of guessed tokens while it grows, and many of them as one `Draft`.

For drafters that know tokens, not distributions (copies, look-ups, caches): all nodes are placed
deterministically. Siblings never repeat a token, so two guesses with a common beginning share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from outrider.types import Draft


class TokenTree:
    """Nodes in the order they were added: parents before children. -1 is the pending token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._child: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def add(self, parent: int, token: int) -> int:
        """The child of `parent` with this token, made if it is not there yet."""
        node = self._child.get((parent, token))
        return self.append(parent, token) if node is None else node

    def append(self, parent: int, token: int) -> int:
        """A new child of `parent`, even where an equal one is there; later guesses share the first."""
        node = len(self.tokens)
        self._child.setdefault((parent, token), node)
        self.tokens.append(token)
        self.parents.append(parent)
        return node

    def add_path(self, tokens: Iterable[int], budget: int, parent: int = -1) -> None:
        """A chain of tokens below `parent`, cut where the tree would have more than `budget` nodes."""
        for token in tokens:
            if len(self) >= budget:
                return
            parent = self.add(parent, token)

    def first(self, count: int) -> TokenTree:
        """The tree of the first `count` nodes."""
        if count >= len(self):
            return self
        tree = TokenTree()
        for parent, token in zip(self.parents[:count], self.tokens[:count], strict=True):
            tree.append(parent, token)
        return tree


def to_draft(
    trees: Sequence[TokenTree], device: torch.device | str, *, nested: bool = False
) -> Draft:
    """The trees as one deterministic draft; plain chains stay chains (`parents=None`). `nested`: a
    smaller budget would give the same tree without its last nodes, because the budget only ends the
    growth (`Draft.budgets`).
    """
    width = max(map(len, trees), default=0)
    if not width:
        return Draft.empty(len(trees), device)

    def padded(rows: Iterable[list[int]], fill: int) -> list[list[int]]:
        return [row + [fill] * (width - len(row)) for row in rows]

    tokens = padded((tree.tokens for tree in trees), 0)
    lengths = [len(tree) for tree in trees]
    parents = (
        None
        if all(tree.is_chain for tree in trees)
        else padded((tree.parents for tree in trees), -1)
    )
    draft = Draft(
        tokens=torch.tensor(tokens, device=device),
        lengths=torch.tensor(lengths, device=device),
        parents=None if parents is None else torch.tensor(parents, device=device),
        budgets=[list(range(1, width + 1))] * len(trees) if nested else None,
    )
    draft.lists = tokens, lengths
    if parents is not None:
        draft.parent_lists = parents
    return draft
