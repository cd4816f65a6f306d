"""Suffix decoding: continue as this text, or any earlier answer, went on after the same words
(arXiv 2411.04975).

Prompt lookup with counts, any match length, and a memory. Two suffix trees are asked: one of the
row's own prompt and output, one of the outputs of rows that have left. In each, every match length
of the text's end is a point to read on from, scored by the number of tokens expected to be
accepted; the best guess of both is drafted. Where nothing is likely, nothing is proposed and the
step is plain decoding. Made for repetitive work: agents, rewriting, code, the same questions again.

`suffix_tree.py` is the data structure, `suffix_search.py` the search, `suffix_memory.py` the
bounded memory and its file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from outrider.drafters.base import SMALL_TREE, Drafter, DraftSetup
from outrider.drafters.lookup.suffix_memory import SuffixMemory
from outrider.drafters.lookup.suffix_search import Guess, SearchRule, best_guess
from outrider.drafters.lookup.suffix_tree import Matches, SuffixTree
from outrider.drafters.requirements import Requirements
from outrider.errors import ConfigError
from outrider.rows import PerRow, Row, Rows
from outrider.settings import checked, setting
from outrider.trees.paying import paying
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict

TREE_WIDTH = 4  # children followed per node of a tree


@checked()
@dataclass(frozen=True)
class SuffixSettings:
    """Options of drafter 'suffix'."""

    max_depth: int = setting(
        64,
        "longest piece of text the trees know, match and continuation together, in tokens",
        at_least=2,
    )
    alpha: float = setting(
        4.0, "after a match of m tokens at most alpha * m + beta are drafted", at_least=0
    )
    beta: float = setting(0.0, "see alpha", at_least=0)
    min_probability: float = setting(
        0.1, "tokens less likely to be accepted are not drafted", at_least=0, below=1
    )
    discount: float = setting(
        0.8,
        "c of n occurrences after m equal tokens count as (c - discount / sqrt(m)) / n",
        at_least=0,
        at_most=1,
    )
    tree: bool = setting(False, "draft several continuations as a tree")
    max_tokens: int = setting(
        200_000,
        "output tokens remembered across requests, the oldest leave first; 0: none",
        at_least=0,
    )
    cache: str = setting(
        "", "file that keeps what is remembered between runs; empty: nothing is kept"
    )

    def __post_init__(self) -> None:
        if not self.alpha + self.beta:
            raise ConfigError("suffix options alpha and beta are both 0: nothing would be drafted")
        if self.cache and not self.max_tokens:
            raise ConfigError(
                "suffix option cache keeps what is remembered, and max_tokens=0 remembers "
                "nothing: drop one"
            )

    @property
    def search(self) -> SearchRule:
        width = TREE_WIDTH if self.tree else 1
        return SearchRule(width, self.alpha, self.beta, self.min_probability, self.discount)


class _Known(NamedTuple):
    """The state of one row."""

    row: Row
    own: SuffixTree  # its prompt and output
    past: Matches  # its end in the memory


class SuffixDrafter(Drafter):
    """Suffix trees over the row's own text and over past outputs."""

    shape = "chain or tree"
    # a long match costs no more, an unlikely token is not drafted at all
    requires = Requirements(num_draft_tokens=SMALL_TREE)
    learns = True
    Settings = SuffixSettings

    def __init__(self, settings: SuffixSettings, vocab_size: int) -> None:
        self._settings = settings
        self._rule = settings.search
        self._vocab_size = vocab_size
        self._known = PerRow[_Known]()
        self.memory = SuffixMemory(settings.max_depth, settings.max_tokens)

    @classmethod
    def requirements(cls, settings: SuffixSettings) -> Requirements:
        return replace(super().requirements(settings), trees=settings.tree)

    @classmethod
    def build(cls, setup: DraftSetup) -> SuffixDrafter:
        """Reads the cache file when there is one. Raises ConfigError for a path that cannot
        be written, CheckpointError for a bad file."""
        drafter = cls(setup.settings, setup.target.lm.shape.vocab_size)
        if setup.settings.cache:
            cache = Path(setup.settings.cache)
            _check_writable(cache)
            if cache.exists():
                drafter.memory.load(cache, drafter._vocab_size)
        return drafter

    def start(self, row: Row) -> None:
        tree = SuffixTree(self._settings.max_depth)
        tree.extend(row.tokens)
        self._known.append(_Known(row, tree, Matches(self.memory.tree)))

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        guesses = [
            self.scored(index, row, count)
            for index, (row, count) in enumerate(zip(rows, gamma, strict=True))
        ]
        trees = [guess.tree.first(len(paying(guess.survival, rows.prices))) for guess in guesses]
        # nested but for the rare budget at which another match is the better one
        return to_draft(trees, rows.device, nested=True)

    def scored(self, index: int, row: Row, count: int) -> Guess:
        """The guess for one row, at most `count` nodes, with each node's estimated probability of
        being accepted.

        For drafters that combine this one with a model: `guess.score` (the sum) and
        `guess.survival` compare with what the model expects of its own tokens. A row without a
        useful match gets an empty tree and score 0.
        """
        known = self._known[index]
        depth = self._settings.max_depth
        known.past.update(row.tokens)
        if not count:
            return Guess(TokenTree(), [])
        guess = best_guess(known.own.points, depth, count, self._rule, from_row=True)
        past = best_guess(known.past.points, depth, count, self._rule, from_row=False)
        return past if past.score > guess.score else guess

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        for known, row in zip(self._known, rows, strict=True):
            known.own.extend(row.tokens)

    def stop(self, index: int) -> None:
        """The row's own tree is dropped; its tokens are remembered, whether the row finished or
        not, unless it comes back."""
        row = self._known[index].row
        super().stop(index)
        if not row.num_learned:
            self.memory.add(row.output)

    def close(self) -> None:
        """Write what is remembered to the cache file, if there is one. May be called again later."""
        if self._settings.cache:
            self.memory.save(Path(self._settings.cache), self._vocab_size)


def _check_writable(cache: Path) -> None:
    """The file is written at the end; whether it can be written is checked at the start."""
    folder = cache.parent
    if cache.is_dir():
        raise ConfigError(f"suffix option cache must name a file, '{cache}' is a folder")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"suffix option cache: the folder '{folder}' does not exist or cannot be written; "
            "make it first"
        )
