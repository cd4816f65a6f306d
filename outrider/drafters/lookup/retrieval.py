"""Retrieval from a corpus: what the user's own texts say after the same words (REST, He et al.
2311.08252).

For domains that repeat themselves across requests (a code base, a manual, form letters, past
answers) no model is needed to guess: the longest end of the row's text that occurs in the corpus is
looked up, from `max_match` tokens down to `min_match`, and what followed its occurrences there is
merged into a trie with counts. The trie is grown best first: the next node is always the one most
occurrences agree on, so a budget of n nodes holds the n likeliest continuations, and their counts
over the number of occurrences add up to the expected number of accepted tokens. Continuations that
a smaller share than `min_share` agrees on are left out.

The corpus is fixed: nothing is learned, rows do not see each other, a draft is a function of the
row's last tokens.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from outrider.drafters.base import SMALL_TREE, Drafter, DraftSetup
from outrider.drafters.lookup.corpus import check_corpus
from outrider.drafters.lookup.corpus_index import open_index
from outrider.drafters.lookup.suffix_array import DEPTH, SuffixArray
from outrider.drafters.requirements import DEFAULT_NUM_DRAFT_TOKENS, Requirements
from outrider.errors import ConfigError
from outrider.rows import Rows
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft


@checked()
@dataclass(frozen=True)
class RetrievalSettings:
    """Options of drafter 'retrieval'."""

    # None first: values are read as the first kind that fits, and None would fit text
    corpus: str | None = setting(None, "text file, .jsonl file or folder to copy from")
    index: str | None = setting(
        None, "file that keeps the corpus's index; alone, it stands for the corpus"
    )
    max_match: int = setting(
        16, f"longest suffix of the text that is looked up, in tokens, at most {DEPTH}"
    )
    min_match: int = setting(2, "shortest end of the text looked up, in tokens")
    branches: int = setting(
        4, "different tokens drafted at one position; 1 drafts chains", at_least=1
    )
    min_share: float = setting(
        0.05,
        "a token is drafted when this share of the occurrences continues with it",
        at_least=0,
        at_most=1,
    )
    max_occurrences: int = setting(
        256, "occurrences looked at; of more, evenly spread ones", at_least=1
    )

    def __post_init__(self) -> None:
        if self.corpus is None and self.index is None:
            raise ConfigError(
                "drafter 'retrieval' needs a corpus to copy from: corpus=PATH, a text file, a "
                ".jsonl file or a folder "
                "of them (or index=PATH of one made before)"
            )
        if self.corpus is not None:
            check_corpus(Path(self.corpus).expanduser())
        if not 1 <= self.min_match <= self.max_match <= DEPTH:
            raise ConfigError(
                f"match lengths must satisfy 1 <= min_match <= max_match <= {DEPTH}, "
                f"got {self.min_match} and {self.max_match}"
            )


class RetrievalDrafter(Drafter):
    """Trees (or chains) of what the corpus says next."""

    needs = "a corpus: text, JSONL or a folder (corpus=PATH)"
    requires = Requirements(tokenizer=True)
    shape = "chain or tree"
    Settings = RetrievalSettings

    def __init__(self, index: SuffixArray, settings: RetrievalSettings) -> None:
        self._index = index
        self._settings = settings

    @classmethod
    def requirements(cls, settings: RetrievalSettings) -> Requirements:
        is_tree = settings.branches > 1
        nodes = SMALL_TREE if is_tree else DEFAULT_NUM_DRAFT_TOKENS
        return replace(super().requirements(settings), trees=is_tree, num_draft_tokens=nodes)

    @classmethod
    def build(cls, setup: DraftSetup) -> RetrievalDrafter:
        settings: RetrievalSettings = setup.settings
        if setup.target.tokenizer is None:
            raise ConfigError(
                f"drafter 'retrieval' needs the tokenizer of '{setup.target.label}', which has none"
            )
        index = open_index(_path(settings.corpus), _path(settings.index), setup.target.tokenizer)
        return cls(index, settings)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = [self._tree(row.tokens, budget) for row, budget in zip(rows, gamma, strict=True)]
        return to_draft(trees, rows.device, nested=True)

    def _tree(self, tokens: list[int], budget: int) -> TokenTree:
        """The corpus's continuations of one text in at most `budget` nodes."""
        if budget == 0:
            return TokenTree()
        chosen = self._settings
        tail = tokens[-chosen.max_match :]
        for length in range(
            self._index.longest_match(tail, chosen.min_match), chosen.min_match - 1, -1
        ):
            occurrences = _spread(
                self._index.find(tail[len(tail) - length :]), chosen.max_occurrences
            )
            followers = self._index.followers(occurrences, budget)
            # else every occurrence ends its document: a shorter match may continue
            if (followers[:, 0] >= 0).any():
                return grow(followers.tolist(), budget, chosen.branches, chosen.min_share)
        return TokenTree()


def grow(followers: list[list[int]], budget: int, branches: int, min_share: float) -> TokenTree:
    """The trie of the continuations, -1 where one has ended, cut to its `budget` most frequent
    nodes.

    At most `branches` children per node, each of which `min_share` of the continuations continue with.
    Among equals the shallower one, then the one met first. Counts fall along a path, so the best
    node left always hangs on the tree.
    """
    tree = TokenTree()
    min_count = max(1.0, min_share * len(followers))
    # (-count, depth, number, parent, continuations through it); numbers differ, so continuations
    # are never compared
    waiting: list[tuple[int, int, int, int, list[list[int]]]] = []
    number = itertools.count()

    def push_children(parent: int, depth: int, through: list[list[int]]) -> None:
        groups: dict[int, list[list[int]]] = {}
        for continuation in through:
            groups.setdefault(continuation[depth], []).append(continuation)
        groups.pop(-1, None)
        for group in sorted(groups.values(), key=len, reverse=True)[:branches]:
            if len(group) >= min_count:
                heapq.heappush(waiting, (-len(group), depth, next(number), parent, group))

    push_children(-1, 0, followers)
    while waiting and len(tree) < budget:
        _, depth, _, parent, group = heapq.heappop(waiting)
        node = tree.add(parent, group[0][depth])
        if depth + 1 < len(group[0]):
            push_children(node, depth + 1, group)
    return tree


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name).expanduser()


def _spread(occurrences: np.ndarray, max_count: int) -> np.ndarray:
    """All occurrences, or `max_count` of them, evenly spread: they stand in the order of their
    continuations."""
    if len(occurrences) <= max_count:
        return occurrences
    return occurrences[np.arange(max_count) * len(occurrences) // max_count]
