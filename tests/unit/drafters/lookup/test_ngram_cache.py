"""What the n-gram cache remembers, what it forgets, and which tree it drafts."""

from __future__ import annotations

import pytest
import torch

from outrider.drafters.lookup.ngram_cache import (
    MAX_FOLLOWERS,
    NgramCache,
    NgramCacheDrafter,
    NgramCacheSettings,
)
from outrider.errors import ConfigError
from outrider.rows import Rows
from tests.unit.drafters.fake_target import join, step


def _cache(text: list[int], low: int = 1, high: int = 2, max_entries: int = 1000) -> NgramCache:
    cache = NgramCache(low, high, max_entries)
    cache.learn(text, 0)
    return cache


def _drafter(rows: list[list[int]], **settings: float) -> tuple[NgramCacheDrafter, Rows]:
    drafter = NgramCacheDrafter(NgramCacheSettings(**settings))
    batch = Rows(100, torch.device("cpu"))
    for prompt in rows:
        join(drafter, batch, prompt)
    return drafter, batch


def _next(token: int) -> int:
    return token % 30 + 1


def test_most_counted_first_newest_of_equals() -> None:
    """Catches counts that are ignored, or the oldest of equals proposed first."""
    after = _cache([1, 7, 1, 8, 1, 9, 1, 8], high=1).after((1,))
    assert [token for token, _ in after] == [8, 9, 7]
    assert [share for _, share in after] == pytest.approx([2 / 4.5, 1 / 4.5, 1 / 4.5])


def test_longest_known_context_decides() -> None:
    """Catches a short, frequent context that drowns the long, exact one."""
    cache = _cache([5, 1, 7, 0, 1, 8, 0, 1, 8])
    assert cache.after((5, 1))[0][0] == 7
    assert cache.after((6, 1))[0][0] == 8


def test_a_newcomer_displaces_the_rarest() -> None:
    """Catches followers that pile up, and a full entry that can never learn anything new."""
    cache = _cache([1, 2, 1, 2, 1, 3, 1, 4, 1, 5, 1, 6], low=1, high=1)
    assert [token for token, _ in cache.after((1,))] == [2, 6, 5, 4]
    assert MAX_FOLLOWERS == 4


def test_the_ngram_unused_for_longest_is_forgotten() -> None:
    """Catches a table without bound, and one that forgets what it just used."""
    cache = NgramCache(1, 1, max_entries=2)
    cache.learn([1, 2, 3], 0)  # entries: 1, 2
    assert cache.after((1,))  # a use
    cache.learn([3, 4], 1)  # entry 3 displaces 2
    assert len(cache) == 2
    assert not cache.after((2,))
    assert cache.after((1,))
    assert cache.after((3,))


def test_learning_in_pieces_is_learning_at_once() -> None:
    """Catches n-grams lost, or counted twice, at the seam between two steps."""
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 3]
    pieces = NgramCache(2, 3, 1000)
    for end in range(1, len(text) + 1):
        pieces.learn(text[:end], end - 1)
    assert pieces._counts == _cache(text, 2, 3)._counts


def test_likeliest_continuations_become_the_tree() -> None:
    """Catches a search by depth or by breadth: here the third node is the favourite's child, the
    fourth the runner-up."""
    drafter, rows = _drafter([[1, 2, 5, 1, 2, 5, 1, 2, 5, 1, 3, 1]], min_ngram=1, max_ngram=1)
    draft = drafter.propose(rows, [4])
    # behind 1: 2 (3 of 4.5), 3 (1 of 4.5); behind 2: 5 (3 of 3.5); behind 5: 1 (3 of 3.5)
    assert draft.tokens.tolist() == [[2, 5, 1, 2]]
    assert draft.parents is None
    draft = drafter.propose(rows, [6])
    assert draft.tokens.tolist() == [[2, 5, 1, 2, 5, 1]]
    drafter, rows = _drafter([[1, 2, 5, 1, 2, 6, 1, 3, 1]], min_ngram=1, max_ngram=1)
    draft = drafter.propose(rows, [5])
    # behind 1: 2 (2 of 3.5), 3 (1 of 3.5); behind 2: 6, 5 (1 of 2.5 each); behind 3: 1 (1 of 1.5)
    assert draft.tokens.tolist() == [[2, 3, 6, 5, 1]]
    assert draft.parents is not None
    assert draft.parents.tolist() == [[-1, -1, 0, 0, 1]]


def test_unlikely_continuations_are_not_drafted() -> None:
    """Catches a threshold on the last edge alone instead of the whole path."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    drafter, rows = _drafter([text], min_ngram=1, max_ngram=1, min_probability=0.25)
    # (2/3)^3 = 0.30, (2/3)^4 = 0.20
    assert drafter.propose(rows, [9]).tokens.tolist() == [[2, 3, 4]]


def test_one_branch_is_a_chain() -> None:
    """Catches a second child where chains were asked for, which chain verifiers cannot take."""
    drafter, rows = _drafter(
        [[1, 2, 1, 3, 1, 4, 1]], branches=1, min_ngram=1, max_ngram=1, min_probability=0.0
    )
    draft = drafter.propose(rows, [6])
    assert draft.parents is None
    assert draft.lengths.tolist() == [6]
    assert not NgramCacheDrafter.requirements(NgramCacheSettings(branches=1)).trees


def test_what_one_row_emitted_helps_the_next() -> None:
    """Catches a cache that is per row: the second row must be drafted for from the first row's
    output."""
    drafter, rows = _drafter([[1, 2]])
    while len(rows[0].output) < 25:
        step(drafter, rows, [4], _next)
    assert rows[0].stats.accepted == 0  # nothing repeats
    rows.swap_remove(0)
    drafter.stop(0)
    join(drafter, rows, [4, 5])
    while len(rows[0].output) < 15:
        step(drafter, rows, [4], _next)
    assert rows[0].stats.steps == 3  # four drafted tokens and one more, each time


def test_a_row_that_comes_back_is_learned_once() -> None:
    """Catches a preempted text that counts twice, and one that nothing is learned from any more."""
    drafter, rows = _drafter([[1, 2]])
    step(drafter, rows, [4], _next)
    before = {context: dict(counts) for context, counts in drafter._cache._counts.items()}
    row = rows.swap_remove(0)
    row.num_learned = len(row.tokens)
    drafter.stop(0)
    drafter.join(rows, row)
    assert drafter._cache._counts == before
    step(drafter, rows, [4], _next)
    assert len(drafter._cache) > len(before)


def test_prompts_need_not_be_learned() -> None:
    """Catches `learn_prompts` ignored, and output that is not learned either."""
    prompt = [1, 2, 3, 1, 2]
    drafter, rows = _drafter([prompt], learn_prompts=False)
    assert drafter.propose(rows, [4]).lengths.tolist() == [0]
    step(drafter, rows, [4], _next)
    assert drafter._cache.after((1, 2))[0][0] == 3
    assert len(drafter._cache) == 3  # three sizes, one token of output


def test_each_row_gets_no_more_than_it_may() -> None:
    """Catches a budget taken from the neighbour, and a row without any."""
    drafter, rows = _drafter([[1, 2, 3, 1, 2], [1, 2], [7]])
    assert drafter.propose(rows, [2, 0, 5]).lengths.tolist() == [2, 0, 0]
    assert drafter.propose(rows, [0, 1, 5]).lengths.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_ngram": 3, "max_ngram": 2}, "min_ngram"),
        ({"branches": 5}, "branches"),
        ({"min_probability": 1.0}, "min_probability"),
        ({"max_entries": 0}, "max_entries"),
    ],
)
def test_settings_are_checked(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramCacheSettings(**settings)
