"""n-gram cache: what followed the same few tokens before, in any text this process has seen; it
improves over time.

One table for all rows: the last n tokens -> which tokens followed, and how often. Every committed
token of every row is entered, prompts included. A draft is grown best-first: the likeliest
continuation by the counts becomes the next node, until the nodes are used up or nothing likely is
left. (llama.cpp's lookup decoding keeps such a cache; Stewart et al. 2411.03786 study drafting from
n-gram counts.)

Prompt lookup (`ngram`) reads one row's own text and copies what came last; this remembers other
rows and what comes most often. The table is bounded: the n-grams not used for longest go first.
What is drafted for a row depends on the texts before it, hence `learns`. Costs and limits:
docs/algorithms/ngram-cache.md.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.drafters.base import SMALL_TREE, Drafter, DraftSetup
from outrider.drafters.requirements import DEFAULT_NUM_DRAFT_TOKENS, Requirements
from outrider.errors import ConfigError
from outrider.rows import PerRow, Row, Rows
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict

MAX_FOLLOWERS = 4  # different tokens remembered after one n-gram
UNSEEN = 0.5  # counted for all tokens that never followed: one observation alone is no certainty

Context = tuple[int, ...]
# minus its probability, parent, rank, token, tokens before it
Candidate = tuple[float, int, int, int, Context]


@checked()
@dataclass(frozen=True)
class NgramCacheSettings:
    min_ngram: int = setting(2, "shortest n-gram looked up, in tokens")
    max_ngram: int = setting(4, "longest n-gram looked up, in tokens")
    branches: int = setting(
        3,
        f"continuations drafted after one token, at most {MAX_FOLLOWERS}; 1 drafts chains",
        at_least=1,
        at_most=MAX_FOLLOWERS,
    )
    min_probability: float = setting(
        0.05,
        "nodes whose path is less likely than this, by the counts, are not drafted",
        at_least=0,
        below=1,
    )
    max_entries: int = setting(
        200_000,
        "n-grams kept, about 400 bytes each; the ones unused for longest go first",
        at_least=1,
    )
    learn_prompts: bool = setting(
        True, "also learn from prompts, not only from the model's answers"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                "ngram-cache: sizes must satisfy 1 <= min_ngram <= max_ngram, got "
                f"{self.min_ngram} and {self.max_ngram}"
            )


class NgramCache:
    """n-gram -> counts of the tokens that followed it. n-grams and followers not used for longest
    are forgotten."""

    def __init__(self, min_ngram: int, max_ngram: int, max_entries: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._max_entries = max_entries
        # least recently used first
        self._counts: OrderedDict[Context, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Count tokens[start:], each as the follower of the n-grams before it."""
        for position in range(max(start, 1), len(tokens)):
            for size in self._sizes:
                if size <= position:
                    self._count(tuple(tokens[position - size : position]), tokens[position])

    def after(self, context: Context) -> list[tuple[int, float]]:
        """(token, estimated probability), likeliest first, after the longest known end of
        `context`; newest of equals first."""
        for size in self._sizes:
            counts = self._counts.get(context[-size:]) if size <= len(context) else None
            if counts is not None:
                self._counts.move_to_end(context[-size:])
                total = sum(counts.values()) + UNSEEN
                ranked = sorted(reversed(counts.items()), key=lambda item: -item[1])
                return [(token, count / total) for token, count in ranked]
        return []

    def _count(self, ngram: Context, follower: int) -> None:
        counts = self._counts.setdefault(ngram, {})
        self._counts.move_to_end(ngram)
        counts[follower] = counts.pop(follower, 0) + 1  # put last: the newest
        if len(counts) > MAX_FOLLOWERS:  # a newcomer displaces the rarest, the oldest of equals
            del counts[min(list(counts)[:-1], key=counts.__getitem__)]
        if len(self._counts) > self._max_entries:
            self._counts.popitem(last=False)


class NgramCacheDrafter(Drafter):
    """The continuations that were seen most, from one table for all rows."""

    shape = "chain or tree"
    learns = True
    Settings = NgramCacheSettings

    def __init__(self, settings: NgramCacheSettings) -> None:
        self._settings = settings
        self._cache = NgramCache(settings.min_ngram, settings.max_ngram, settings.max_entries)
        self._num_learned = PerRow[int]()  # per row, how many of its tokens the table has seen

    @classmethod
    def requirements(cls, settings: NgramCacheSettings) -> Requirements:
        is_tree = settings.branches > 1
        nodes = SMALL_TREE if is_tree else DEFAULT_NUM_DRAFT_TOKENS
        return replace(super().requirements(settings), trees=is_tree, num_draft_tokens=nodes)

    @classmethod
    def build(cls, setup: DraftSetup) -> NgramCacheDrafter:
        return cls(setup.settings)

    def start(self, row: Row) -> None:
        self._num_learned.append(
            max(row.num_learned, 0 if self._settings.learn_prompts else row.num_prompt)
        )
        self._learn(len(self._num_learned) - 1, row)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        tail = self._settings.max_ngram
        trees = [
            self._grow(tuple(row.tokens[-tail:]), budget)
            for row, budget in zip(rows, gamma, strict=True)
        ]
        return to_draft(trees, rows.device, nested=True)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        for index, row in enumerate(rows):
            self._learn(index, row)

    def _learn(self, index: int, row: Row) -> None:
        self._cache.learn(row.tokens, self._num_learned[index])
        self._num_learned[index] = max(self._num_learned[index], len(row.tokens))

    def _grow(self, tail: Context, budget: int) -> TokenTree:
        """Best-first: of all continuations of the tree so far, the likeliest becomes its next node."""
        tree = TokenTree()
        waiting = list(self._candidates(-1, tail, 1.0)) if budget else []
        heapq.heapify(waiting)
        while waiting and len(tree) < budget:
            minus_probability, parent, _, token, context = heapq.heappop(waiting)
            node = tree.add(parent, token)
            for candidate in self._candidates(
                node, (*context, token)[-self._settings.max_ngram :], -minus_probability
            ):
                heapq.heappush(waiting, candidate)
        return tree

    def _candidates(self, parent: int, context: Context, probability: float) -> Iterator[Candidate]:
        """The likely continuations of one node, `probability` being that of the path to it."""
        for rank, (token, share) in enumerate(
            self._cache.after(context)[: self._settings.branches]
        ):
            if probability * share >= self._settings.min_probability:
                yield -probability * share, parent, rank, token, context
