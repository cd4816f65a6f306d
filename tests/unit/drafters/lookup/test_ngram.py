"""What prompt lookup copies."""

from __future__ import annotations

import pytest
import torch

from outrider.drafters.lookup.ngram import NgramDrafter, NgramIndex, NgramSettings
from outrider.errors import ConfigError
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.settings import parse_settings
from outrider.trees.token_tree import TokenTree
from outrider.types import Draft
from tests.helpers import make_row


def _guess(text: list[int], count: int, **settings: object) -> TokenTree:
    """The guess of a drafter that starts on this text, through the drafter's own door."""
    draft = _draft([text], [count], **settings)
    tree = TokenTree()
    for token, parent in zip(
        draft.tokens[0].tolist(), draft.parent_nodes()[0].tolist(), strict=True
    ):
        tree.add(parent, token)
    return tree


def _draft(texts: list[list[int]], gamma: list[int], **settings: object) -> Draft:
    drafter = NgramDrafter(NgramSettings(**{"min_share": 0.0, **settings}))  # type: ignore[arg-type]
    rows = Rows(100, torch.device("cpu"))
    for text in texts:
        rows.add(make_row(text, SamplingParams(max_tokens=20)))
        drafter.start(rows[len(rows) - 1])
    return drafter.propose(rows, gamma)


def _copy(text: list[int], count: int, **settings: object) -> list[int]:
    tree = _guess(text, count, **settings)
    assert tree.is_chain
    return tree.tokens


def test_most_recent_match_wins() -> None:
    """With equal lengths and counts, what came last is likelier; the original's first occurrence
    would copy 7."""
    assert _copy([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_longest_match_wins_over_a_more_recent_short_one() -> None:
    """Catches votes that ignore how much of the text agrees: 7 followed (5, 1, 2), 8 only (1, 2)."""
    assert _copy([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 1) == [7]


def test_many_short_matches_win_over_one_long_match() -> None:
    """Catches the blind rule "longest first": a single (5, 1, 2) -> 7 against six (1, 2) -> 8."""
    once = [5, 1, 2, 7]
    assert _copy([*once, *[6, 1, 2, 8] * 6, 5, 1, 2], 1, min_ngram=2) == [8]
    assert _copy([*once, *[6, 1, 2, 8] * 2, 5, 1, 2], 1, min_ngram=2) == [7]


def test_count_wins_over_recency_unless_set_otherwise() -> None:
    """Catches a setting without effect: 8 followed twice, 9 last."""
    text = [1, 2, 8, 3, 1, 2, 8, 4, 1, 2, 9, 5, 1, 2]
    assert _copy(text, 1) == [8]
    assert _copy(text, 1, recency=0.0) == [9]


def test_votes_are_counted_again_at_every_token() -> None:
    """Catches a copy that stays with one occurrence: all three agree on 7, then two older ones
    outvote the most recent."""
    assert _copy([1, 2, 7, 5, 8, 1, 2, 7, 5, 9, 1, 2, 7, 3, 4, 1, 2], 2, min_ngram=2) == [7, 5]


def test_copy_that_reaches_the_end_goes_on_with_itself() -> None:
    """Short copies are useful: a period is continued, not cut off."""
    assert _copy([1, 2, 3, 1, 2], 5) == [3, 1, 2, 3, 1]


def test_nothing_is_proposed_without_a_match() -> None:
    """The end of the text must not match itself; a shorter match than min_ngram does not count."""
    assert _copy([1, 2, 3, 4, 5], 4) == []
    assert _copy([5, 2, 3, 4, 5], 4, min_ngram=2) == []
    assert _copy([5, 2, 3, 4, 5], 4, min_ngram=1) == [2, 3, 4, 5]


def test_unlikely_tokens_are_not_drafted() -> None:
    """One lone match of one token: every further token halves the trust, roughly. Catches an
    ignored min_share."""
    text = [5, 1, 2, 3, 4, 5]
    lengths = [len(_copy(text, 4, min_share=share)) for share in (0.0, 0.25, 0.5, 0.7)]
    assert lengths == [4, 3, 1, 0]  # 2/3, 4/9, 8/27, 16/81


def test_branches_where_occurrences_disagree() -> None:
    """A tree holds both continuations below what they share, likelier first; a chain only the
    likelier one."""
    text = [1, 2, 7, 8, 5, 1, 2, 7, 9, 6, 1, 2]
    tree = _guess(text, 5, tree=2, min_ngram=2)
    assert (tree.tokens, tree.parents) == ([7, 9, 8, 6, 5], [-1, 0, 0, 1, 2])
    assert _copy(text, 3, min_ngram=2) == [7, 9, 6]


def test_number_of_branches_is_a_limit() -> None:
    """Catches a tree with more leaves than asked for, or nodes spent before the budget is known."""
    text = [1, 3, 1, 4, 1, 5, 1, 6, 1]
    for branches in (1, 2, 3, 4):
        tree = _guess(text, 9, tree=branches)
        leaves = set(range(len(tree))) - set(tree.parents)
        assert (len(leaves), len(tree)) == (branches, 9)
    forks = [1, 2, 7, 8, 1, 2, 7, 9, 1, 3, 4, 1]  # two below the end, two more further down
    for branches, leaves in ((1, 1), (2, 2), (3, 3), (True, 3)):
        tree = _guess(forks, 12, tree=branches)
        assert len(set(range(12)) - set(tree.parents)) == leaves


def test_budgets_are_kept_per_row() -> None:
    """Catches a row that drafts with its neighbour's budget, and padding counted as tokens."""
    draft = _draft([[1, 2, 3, 1, 2], [4, 4, 4], [1, 2, 3, 1, 2]], [0, 2, 4])
    assert draft.lengths.tolist() == [0, 2, 4]
    assert draft.tokens.tolist() == [[0, 0, 0, 0], [4, 4, 0, 0], [3, 1, 2, 3]]
    assert draft.parents is None


def test_incremental_index_equals_a_fresh_one() -> None:
    """Commit is total: catches an update that forgets the n-grams across the seam."""
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 3, 3, 1]
    grown = NgramIndex(1, 3)
    fresh = NgramIndex(1, 3)
    for end in range(1, len(text) + 1):
        grown.update(text[:end])
    fresh.update(text)
    assert vars(grown) == vars(fresh)


def test_only_so_many_occurrences_vote() -> None:
    """Catches a step that costs more the longer the text is; the most recent occurrences are the
    ones kept."""
    index = NgramIndex(1, 1)
    index.update([7] * 1000)
    assert list(index.matches([7] * 1000)) == [999, 998, 997, 996, 995, 994, 993, 992]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"min_ngram": 3, "max_ngram": 2}, "min_ngram"),
        ({"min_ngram": 0}, "min_ngram"),
        ({"recency": 1.5}, "recency"),
        ({"min_share": 1.0}, "min_share"),
        ({"tree": 0}, "tree"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], name: str) -> None:
    """Catches a value that would be used in silence."""
    with pytest.raises(ConfigError, match=name):
        NgramSettings(**settings)  # type: ignore[arg-type]


def test_tree_setting_decides_what_the_verifier_must_take() -> None:
    """One branch is a chain, and may go to a chain verifier."""
    given = {"false": 1, "true": 4, "1": 1, "3": 3}
    found = [parse_settings(NgramSettings, {"tree": text}, "drafter 'ngram'") for text in given]
    assert [settings.branches for settings in found] == list(given.values())
    assert [NgramDrafter.requirements(settings).trees for settings in found] == [
        False,
        True,
        False,
        True,
    ]
