"""Token recycling: what the target thought last time it saw a token is what it may think again (Luo
et al. 2408.08696).

A target pass computes the whole distribution after every draft node, and nearly all of it is
thrown away. Recycling keeps the k likeliest tokens after each node, rejected nodes included, in a
table: M[x] = the k favourites the last time token x was fed. A draft is read off the table:
M[pending] follow the pending token, M[x] follow each of those, in one fixed shape that gives
likelier ranks more room. Only a token's last context is remembered, and only one token of context
is looked at: cheap guesses, wide trees.

One table for all rows, so what is drafted for a row depends on other rows: `learns`. A token that
was never fed has no favourites yet: other branches get its room, and while little is known trees
are smaller. Until then a token of a prompt is followed by what followed it there. Costs and
numbers: docs/algorithms/token-recycling.md.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from outrider.drafters.base import SMALL_TREE, Drafter, DraftSetup
from outrider.drafters.requirements import DEFAULT_NUM_DRAFT_TOKENS, Requirements
from outrider.rows import PerRow, Row, Rows
from outrider.runtime.top_tokens import NONE, TopTokens
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict

# Assumed chance that the favourite of this rank comes next, the same at every depth. Only their
# proportions matter.
RANK_ACCEPTANCE = (0.50, 0.15, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)
SPARE = 4  # nodes in the shape for each node of a tree: they replace those whose token is not known
UNKNOWN = NONE


@checked()
@dataclass(frozen=True)
class RecyclingSettings:
    top_k: int = setting(
        8,
        "likeliest next tokens remembered for each token; 1 drafts chains",
        at_least=1,
        at_most=len(RANK_ACCEPTANCE),
    )


class ShapeNode(NamedTuple):
    """A node of the tree's shape: the favourite of rank `rank` after its parent (-1: after the
    pending token)."""

    parent: int
    rank: int


def tree_shape(num_nodes: int, top_k: int) -> list[ShapeNode]:
    """The `num_nodes` nodes most likely to be accepted, likeliest first, so parents before
    children.

    A node is accepted with the product of its path's RANK_ACCEPTANCE. The shape for n nodes begins
    the one for n + 1.
    """
    shape: list[ShapeNode] = []
    waiting = [(-chance, -1, rank) for rank, chance in enumerate(RANK_ACCEPTANCE[:top_k])]
    heapq.heapify(waiting)
    while len(shape) < num_nodes:
        minus_chance, parent, rank = heapq.heappop(waiting)
        for child, chance in enumerate(RANK_ACCEPTANCE[:top_k]):
            heapq.heappush(waiting, (minus_chance * chance, len(shape), child))
        shape.append(ShapeNode(parent, rank))
    return shape


class FollowerTable:
    """(V, k) int32: the last known favourites after every token, likeliest first; UNKNOWN where
    there are none."""

    def __init__(self, vocab_size: int, top_k: int) -> None:
        self.favourites = np.full((vocab_size, top_k), UNKNOWN, dtype=np.int32)

    def grow(self, pending: int, shape: list[ShapeNode], budget: int) -> TokenTree:
        """The shape's first `budget` nodes that can be filled. Where a favourite is unknown, all
        that follows is too."""
        tree = TokenTree()
        nodes: list[int | None] = []  # index -> node
        # node -> its favourites
        followers: dict[int, list[int]] = {-1: self.favourites[pending].tolist()}
        for parent_index, rank in shape:
            if len(tree) >= budget:
                break
            parent = -1 if parent_index < 0 else nodes[parent_index]
            token = UNKNOWN if parent is None else followers[parent][rank]
            if parent is None or token == UNKNOWN:
                nodes.append(None)
                continue
            node = tree.add(parent, token)
            followers[node] = self.favourites[token].tolist()
            nodes.append(node)
        return tree

    def update(self, tokens: list[int], favourites: np.ndarray) -> None:
        """`favourites` (n, k) stand after `tokens`; where a token comes twice, the later one
        counts."""
        self.favourites[tokens] = favourites

    def read(self, text: list[int]) -> None:
        """Let tokens that were never fed be followed by what follows them in this text."""
        token = np.array(text[:-1], dtype=np.int64)
        follower = np.array(text[1:], dtype=np.int32)
        new = self.favourites[token, 0] == UNKNOWN
        self.favourites[token[new], 0] = follower[new]


class RecyclingDrafter(Drafter):
    """A static tree of the favourites the target had before."""

    shape = "chain or tree"
    requires = Requirements(logits=True)
    learns = True
    Settings = RecyclingSettings

    def __init__(
        self,
        vocab_size: int,
        num_nodes: int,
        settings: RecyclingSettings,
        top_tokens: TopTokens | None = None,
    ) -> None:
        self._top_tokens = top_tokens or TopTokens()
        self._table = FollowerTable(vocab_size, settings.top_k)
        self._shape = tree_shape(SPARE * num_nodes, settings.top_k)
        # per row, when it was last drafted for: the pending token was its last
        self._num_tokens = PerRow[int]()

    @classmethod
    def requirements(cls, settings: RecyclingSettings) -> Requirements:
        is_tree = settings.top_k > 1
        nodes = SMALL_TREE if is_tree else DEFAULT_NUM_DRAFT_TOKENS
        return replace(super().requirements(settings), trees=is_tree, num_draft_tokens=nodes)

    @classmethod
    def build(cls, setup: DraftSetup) -> RecyclingDrafter:
        lm = setup.target.lm
        return cls(
            lm.shape.vocab_size, setup.num_draft_tokens, setup.settings, TopTokens(lm.kernels)
        )

    def start(self, row: Row) -> None:
        self._table.read(row.tokens)
        self._num_tokens.append(len(row.tokens))

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = [
            self._table.grow(row.tokens[-1], self._shape, budget)
            for row, budget in zip(rows, gamma, strict=True)
        ]
        return to_draft(trees, rows.device, nested=True)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        top_k = self._table.favourites.shape[1]
        width = draft.num_nodes + 1
        paths = verdict.lists.path
        counts = verdict.lists.num_accepted
        fed: list[int] = []
        outputs: list[int] = []
        for index, (row, tokens, length) in enumerate(zip(rows, *draft.lists, strict=True)):
            followed = [row.tokens[self._num_tokens[index] - 1], *tokens[:length]]
            columns = [0, *(node + 1 for node in paths[index][: counts[index]])]
            others = [number for number in range(len(followed)) if number not in columns]
            order = [*others, *columns]  # kept nodes last: their context is the text itself
            fed += [followed[number] for number in order]
            outputs += [index * width + number for number in order]
            self._num_tokens[index] = len(row.tokens)
        self._table.update(fed, self._top_tokens.tokens(output.logits, outputs, top_k))
