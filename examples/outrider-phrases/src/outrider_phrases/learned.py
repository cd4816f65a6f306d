"""Learns phrases while it decodes: drafts what followed the same few tokens most often, in any text
of this process.

One table for all rows: answers teach each other. So drafts depend on more than a row's own tokens,
which the class says (`learns`); the text does not, by any lossless verifier.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.requirements import Requirements
from outrider.rows import PerRow, Row, Rows
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict


@checked()
@dataclass(frozen=True)
class LearnedSettings:
    """Options of drafter 'learned-phrases'."""

    context: int = setting(
        3, "tokens that must be the same before what followed them is drafted", at_least=1
    )
    max_entries: int = setting(
        100_000, "contexts that are remembered; the oldest are forgotten", at_least=1
    )


class LearnedPhraseDrafter(Drafter):
    """Drafts what followed the same tokens before."""

    learns = True
    requires = Requirements(num_draft_tokens=8)
    Settings = LearnedSettings

    def __init__(self, settings: LearnedSettings) -> None:
        self._settings = settings
        self._followers: dict[tuple[int, ...], Counter[int]] = {}  # of all rows; the oldest first
        self._num_learned = PerRow[int]()  # tokens of each row that were counted

    @classmethod
    def build(cls, setup: DraftSetup) -> LearnedPhraseDrafter:
        return cls(setup.settings)

    def start(self, row: Row) -> None:
        self._num_learned.append(row.num_learned)
        self._learn(len(self._num_learned) - 1, row)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = [self._chain(row.tokens, budget) for row, budget in zip(rows, gamma, strict=True)]
        return to_draft(trees, rows.device, nested=True)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        for index, row in enumerate(rows):
            self._learn(index, row)

    def _learn(self, index: int, row: Row) -> None:
        """Count what the text has gained."""
        size = self._settings.context
        for position in range(max(self._num_learned[index], size), len(row.tokens)):
            context = tuple(row.tokens[position - size : position])
            self._followers.setdefault(context, Counter())[row.tokens[position]] += 1
            if len(self._followers) > self._settings.max_entries:
                del self._followers[next(iter(self._followers))]
        self._num_learned[index] = len(row.tokens)

    def _chain(self, tokens: list[int], budget: int) -> TokenTree:
        """The likeliest continuation, as far as one is known."""
        tree = TokenTree()
        context = tuple(tokens[-self._settings.context :])
        while len(tree) < budget and context in self._followers:
            ((token, _),) = self._followers[context].most_common(1)
            tree.add(len(tree) - 1, token)
            context = (*context[1:], token)
        return tree
