"""`outrider.testing`: right drafters pass, and each kind of mistake is found by the check that is for
it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.requirements import Requirements
from outrider.errors import DraftError
from outrider.rows import PerRow, Row, Rows
from outrider.testing import (
    PROMPTS,
    byte_tokenizer,
    check_drafter,
    check_greedy,
    check_rows,
    check_sampling,
    make_row,
    make_rows,
    tiny_target,
)
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict

LETTERS = list(dict.fromkeys(byte_tokenizer()(PROMPTS[0])["input_ids"]))[:3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "ngram-cache", "suffix", "early-exit", "draft-model"])
def test_drafters_of_ours_pass(name: str) -> None:
    drafter = DRAFTERS.load(name)
    needs_draft = drafter.requirements(drafter.Settings()).draft
    check_drafter(drafter, draft=tiny_target(seed=1) if needs_draft else None)


class Drawing(Drafter):
    """Draws single tokens of the letters that are sampled from, uniformly, and says so."""

    is_honest = True
    withholds = False

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        stated = [1 / 3, 1 / 3, 1 / 3] if self.is_honest else [0.9, 0.05, 0.05]
        probs = torch.zeros(len(rows), 2, rows.vocab_size)
        probs[:, :, LETTERS] = torch.tensor(stated)
        drawn = torch.randint(3, (len(rows), 1), generator=self._generator)
        lengths = torch.tensor([min(size, 1) for size in gamma])
        if self.withholds:
            lengths *= drawn[:, 0] > 0
        tokens = torch.tensor(LETTERS)[drawn]
        return Draft(
            tokens, lengths, probs=probs, sampled=torch.ones_like(tokens, dtype=torch.bool)
        )


class Lying(Drawing):
    """States another distribution than it draws from."""

    is_honest = False


class Withholding(Drawing):
    """Draws a token and leaves it out because of its value."""

    withholds = True


@pytest.mark.slow
def test_an_honest_draw_passes_and_a_biased_one_does_not() -> None:
    check_sampling(Drawing)
    with pytest.raises(AssertionError, match="'Lying' changes the distribution of sampled texts"):
        check_sampling(Lying)
    with pytest.raises(AssertionError, match="'Withholding' changes the distribution"):
        check_sampling(Withholding)


class Repeating(Drafter):
    """Drafts what its state says: the last token that it has seen of each row."""

    def __init__(self) -> None:
        self.seen: Any = PerRow[int]()

    @classmethod
    def build(cls, setup: DraftSetup) -> Drafter:
        return cls()

    def start(self, row: Row) -> None:
        self.seen.append(row.tokens[-1])

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = []
        for index, budget in enumerate(gamma):
            tree = TokenTree()
            tree.add_path([self.seen[index]] * 2, budget)
            trees.append(tree)
        return to_draft(trees, rows.device)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        for index, row in enumerate(rows):
            self.seen[index] = row.tokens[-1]


class KeptInAList(Repeating):
    """Keeps state of rows by their place, in a list that does not follow them."""

    def __init__(self) -> None:
        self.seen = []

    def start(self, row: Row) -> None:
        self.seen.append(row.tokens[-1])


class Forgetful(Repeating):
    """Does not read what a step has brought."""

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        pass


class LearnsTwice(Repeating):
    """Counts the tokens of a row anew when it comes back."""

    learns = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def start(self, row: Row) -> None:
        super().start(row)
        self.total += len(row.tokens)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = []
        for budget in gamma:
            tree = TokenTree()
            tree.add_path([1 + self.total % 256], budget)
            trees.append(tree)
        return to_draft(trees, rows.device)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (KeptInAList, "something else than a fresh start on the same tokens: row"),
        (Forgetful, "something else than a fresh start on the same tokens"),
        (LearnsTwice, "must not learn `row.num_learned` tokens twice"),
    ],
)
def test_state_that_does_not_follow_the_rows_is_found(drafter: type[Drafter], message: str) -> None:
    check_rows(Repeating)
    with pytest.raises(AssertionError, match=message):
        check_rows(drafter)


class Silent(Drafter):
    """Drafts nothing."""

    requires = Requirements(num_draft_tokens=1)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return Draft.empty(len(rows), rows.device)


class Malformed(Drafter):
    """Drafts a token that is none."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return Draft(torch.full((len(rows), 1), 999), torch.tensor([min(g, 1) for g in gamma]))


@pytest.mark.parametrize("check", [check_greedy, check_rows])
def test_a_check_of_nothing_fails(check: Any) -> None:
    with pytest.raises(AssertionError, match="'Silent' drafted nothing, so nothing was checked"):
        check(Silent)
    with pytest.raises(DraftError, match="'Malformed'"):
        check(Malformed)


def test_rows_are_made_in_one_call() -> None:
    row = make_row([1, 2, 3])
    assert (row.tokens, row.num_prompt, row.room, row.params.is_greedy) == ([1, 2, 3], 3, 256, True)
    drafter = Repeating()
    rows = make_rows(drafter, [[1, 2], [3]], vocab_size=9)
    assert [row.tokens for row in rows] == [[1, 2], [3]]
    assert drafter.propose(rows, [1, 1]).lists[0] == [[2], [3]]
