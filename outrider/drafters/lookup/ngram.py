"""Prompt lookup: copy what followed the same few tokens when they were written before.

Wins wherever the answer repeats its prompt or itself: summaries, edits, code, quoted passages.
Every earlier position that ends with the text's last tokens (`min_ngram` to `max_ngram` of them)
votes for what followed it there. A vote weighs more the more tokens agree and the more recent the
position is, and votes for the same token add up: so length, recency and count decide together, at
every token of the copy. One occurrence after four equal tokens outweighs a few after two, but not
many.

The draft follows the heaviest votes: as one chain, or, with `tree`, as several branches where the
positions disagree. A copy that reaches the end of the text continues with itself. (The original, PLD
by Saxena, copies from the first occurrence of the longest n-gram and skips short copies.) Only the
row's own text is used; docs/algorithms/ngram.md has the numbers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import count

from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.requirements import Requirements
from outrider.errors import ConfigError
from outrider.rows import PerRow, Row, Rows
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft

# positions per n-gram length that vote, the most recent ones: bounds the cost of a step
MAX_OCCURRENCES = 8
LENGTH_WEIGHT = 4.0  # a position that agrees in one token more weighs this many times as much
DOUBT = 0.5  # weight of "none of these": what a lone vote of the shortest length is held against
BRANCHES = 4  # `tree=true`

Vote = tuple[int, float]  # where to read on, weight


@checked()
@dataclass(frozen=True)
class NgramSettings:
    """Options of drafter 'ngram'."""

    min_ngram: int = setting(1, "shortest n-gram looked up, in tokens")
    max_ngram: int = setting(4, "longest n-gram looked up, in tokens")
    recency: float = setting(
        0.8,
        "weight of each occurrence relative to the next one: 1 counts all alike, 0 only the last",
        at_least=0,
        at_most=1,
    )
    min_share: float = setting(
        0.1,
        "tokens whose path has a smaller share of the votes are not drafted",
        at_least=0,
        below=1,
    )
    tree: int | bool = setting(
        False, f"draft a tree of several continuations: how many branches, or true for {BRANCHES}"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"ngram sizes must satisfy 1 <= min_ngram <= max_ngram, got {self.min_ngram} and "
                f"{self.max_ngram}"
            )
        if self.tree is not False and self.tree < 1:
            raise ConfigError(
                "ngram option tree must be true, false or a number of branches from 1, got "
                f"{self.tree}"
            )

    @property
    def branches(self) -> int:
        """Leaves of a draft; 1 is a chain."""
        return {False: 1, True: BRANCHES}[self.tree] if isinstance(self.tree, bool) else self.tree


class NgramIndex:
    """Positions of every n-gram in one growing text: a dictionary holds the last, and each position
    links to the one before.

    An occurrence is kept as the position of the token that followed it.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(min_ngram, max_ngram + 1)
        self._last: dict[tuple[int, ...], int] = {}  # n-gram (of any size) -> its last position
        # [size][position] -> earlier position, or -1
        self._before: dict[int, list[int]] = {size: [] for size in self._sizes}
        self._indexed = 0  # tokens [0, _indexed) have been entered as followers

    def update(self, tokens: list[int]) -> None:
        """Enter every n-gram that is followed by a token not seen before: one look-up per token and
        size."""
        last = self._last
        for size, before in self._before.items():
            for position in range(self._indexed, len(tokens)):
                if position < size:
                    before.append(-1)
                    continue
                ngram = tuple(tokens[position - size : position])
                before.append(last.get(ngram, -1))
                last[ngram] = position
        self._indexed = len(tokens)

    def matches(self, tokens: list[int]) -> dict[int, int]:
        """Position -> how many tokens before it equal the text's last ones, the most recent
        position first."""
        positions: dict[int, int] = {}
        for size in reversed(self._sizes):
            position = self._last.get(tuple(tokens[-size:]), -1) if size <= len(tokens) else -1
            for _ in range(MAX_OCCURRENCES):
                if position < 0:
                    break
                positions.setdefault(position, size)
                position = self._before[size][position]
        return dict(sorted(positions.items(), reverse=True))


def continuations(
    tokens: list[int], votes: list[Vote], budget: int, branches: int, min_score: float
) -> TokenTree:
    """The likeliest `budget` nodes that the votes lead to, with at most `branches` leaves.

    A node's score is the share of votes along its path; nodes are taken best first. A second child
    opens a branch.
    """
    tree = TokenTree()
    opened = 1
    order = count()
    # -score, tie, heaviest child?, parent, path, votes
    waiting: list[tuple[float, int, bool, int, list[int], list[Vote]]] = []

    def offer(parent: int, path: list[int], votes: list[Vote], score: float) -> None:
        by_token = _next_tokens(tokens, path, votes)
        total = DOUBT + sum(weight for _, weight in votes)
        shares = [
            (sum(weight for _, weight in agreeing) / total, token)
            for token, agreeing in by_token.items()
        ]
        for rank, (share, token) in enumerate(sorted(shares, key=lambda item: -item[0])[:branches]):
            if score * share < min_score:
                break
            entry = (
                -score * share,
                next(order),
                rank == 0,
                parent,
                [*path, token],
                by_token[token],
            )
            heapq.heappush(waiting, entry)

    offer(-1, [], votes, 1.0)
    while waiting and len(tree) < budget:
        score, _, heaviest, parent, path, agreeing = heapq.heappop(waiting)
        if not heaviest:
            if opened == branches:
                continue
            opened += 1
        offer(tree.add(parent, path[-1]), path, agreeing, -score)
    return tree


def _next_tokens(tokens: list[int], path: list[int], votes: list[Vote]) -> dict[int, list[Vote]]:
    """Votes by the token they read after `path`; beyond the end of the text they read the path
    itself."""
    found: dict[int, list[Vote]] = {}
    for vote in votes:
        source = vote[0] + len(path)
        token = tokens[source] if source < len(tokens) else path[source - len(tokens)]
        found.setdefault(token, []).append(vote)
    return found


class NgramDrafter(Drafter):
    """n-gram prompt lookup over the row's own prompt and output."""

    shape = "chain or tree"
    Settings = NgramSettings

    def __init__(self, settings: NgramSettings | None = None) -> None:
        self._settings = settings or NgramSettings()
        self._indexes = PerRow[NgramIndex]()

    @classmethod
    def requirements(cls, settings: NgramSettings) -> Requirements:
        return replace(super().requirements(settings), trees=settings.branches > 1)

    @classmethod
    def build(cls, setup: DraftSetup) -> NgramDrafter:
        return cls(setup.settings)

    def start(self, row: Row) -> None:
        self._indexes.append(NgramIndex(self._settings.min_ngram, self._settings.max_ngram))
        self._indexes[-1].update(row.tokens)  # the prompt; emitted tokens, once it is drafted from

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        guesses = [
            self._guess(index, row.tokens, budget) if budget else TokenTree()
            for index, row, budget in zip(self._indexes, rows, gamma, strict=True)
        ]
        return to_draft(guesses, rows.device, nested=True)

    def _guess(self, index: NgramIndex, tokens: list[int], budget: int) -> TokenTree:
        index.update(tokens)
        min_ngram = self._settings.min_ngram
        matches = index.matches(tokens).items()
        weights = ((position, LENGTH_WEIGHT ** (size - min_ngram)) for position, size in matches)
        votes = [
            (position, weight * self._settings.recency**age)
            for age, (position, weight) in enumerate(weights)
        ]
        return continuations(
            tokens, votes, budget, self._settings.branches, self._settings.min_share
        )
