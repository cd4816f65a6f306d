"""Where the window stands, what it harvests, and what is proposed when nodes are few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.drafters.base import DraftSetup
from outrider.drafters.lookup.lookahead import (
    GuessWindow,
    LookaheadDrafter,
    LookaheadSettings,
    NgramPool,
    _nodes_by_parent,
)
from outrider.errors import ConfigError
from outrider.rows import Rows
from outrider.trees.token_tree import TokenTree, to_draft
from tests.unit.drafters.fake_target import join, step, target_logits


def _window(*columns: list[int]) -> GuessWindow:
    window = GuessWindow(len(columns), len(columns[0]), text=[0])
    window.columns = [list(column) for column in columns]
    return window


def _drafter(
    rows: list[list[int]], vocab_size: int = 17, **settings: int | bool
) -> tuple[LookaheadDrafter, Rows]:
    chosen = LookaheadSettings(**{"ngram": 4, "window": 4, "guesses": 4, **settings})
    drafter = LookaheadDrafter(chosen)
    batch = Rows(vocab_size, torch.device("cpu"))
    for prompt in rows:
        join(drafter, batch, prompt)
    return drafter, batch


def _cycle(token: int) -> int:
    """3 is a primitive root of 17: one orbit through 1..16."""
    return token * 3 % 17


def test_window_as_nodes() -> None:
    """Catches a window token behind the wrong parent: first tokens form a chain, the others hang
    below their own column."""
    tree = TokenTree()
    _window([99, 10, 20], [1, 11, 21], [2, 12, 22]).plant(tree, budget=100)
    assert tree.tokens == [10, 20, 1, 11, 21, 2, 12, 22]
    assert tree.parents == [-1, 0, -1, 2, 3, 2, 5, 6]


def test_every_position_is_found_where_nodes_are_shared() -> None:
    """Catches positions mapped by counting nodes: equal siblings are one node, of the window and of
    a candidate."""
    window = _window([99, 1, 2], [1, 2, 5], [2, 6, 7])
    tree = TokenTree()
    # a candidate; column 0 is its beginning, column 1 starts like it
    tree.add_path([1, 2, 3], budget=100)
    window.plant(tree, budget=100)
    assert tree.tokens == [1, 2, 3, 5, 6, 7]
    (nodes,) = _nodes_by_parent(to_draft([tree], "cpu"))
    assert window.ends(nodes) == [1, 3, 5]


def test_columns_that_were_not_drafted_have_no_end() -> None:
    """Catches a guess read from an output that belongs to something else."""
    window = _window([99, 10, 20], [1, 11, 21], [2, 12, 22])
    tree = TokenTree()
    window.plant(tree, budget=7)  # 2 + 3 nodes fit, 3 more do not
    assert tree.tokens == [10, 20, 1, 11, 21]
    (nodes,) = _nodes_by_parent(to_draft([tree], "cpu"))
    assert window.ends(nodes) == [1, 4, None]


@pytest.mark.parametrize("num_taken", [1, 2, 3])
def test_window_follows_the_text(num_taken: int) -> None:
    """Catches a window that lags behind or runs ahead: a token guessed for some position must stay
    at that position.

    Here every token is its own position, the pending token's being 10.
    """
    window = _window([10, 11, 12], [11, 12, 13], [12, 13, 14])
    window.move([13, 14, 15], num_taken, text=[7] * 9 + [10 + num_taken])
    kept = 3 - (num_taken - 1)
    for index, column in enumerate(window.columns[:kept]):
        assert column == [10 + num_taken + index + level for level in range(3)]
    assert len(window.columns) == 3
    assert window.columns[0][0] == 10 + num_taken  # the pending token, whatever was guessed there


def test_a_column_that_was_not_drafted_waits() -> None:
    """Catches a dropped token without a guess in its place: columns must keep their N - 1 tokens."""
    window = _window([10, 11], [11, 12], [12, 13])
    window.move([12, None, None], 1, text=[5, 11])
    assert window.columns == [[11, 12], [11, 12], [12, 13]]


def test_pool_keeps_the_newest() -> None:
    """Catches a pool that grows without bound, or forgets what was just seen again."""
    pool = NgramPool(num_kept=2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(2) == []


def test_candidates_come_before_the_window() -> None:
    """Catches a window that takes the nodes of the guesses which get accepted."""
    drafter, _ = _drafter([[1, 2, 3, 4, 5, 1, 6, 7, 8, 9, 1]])
    for budget in range(12):
        tree = drafter._rows[0].tree(1, budget)
        assert len(tree) <= budget
        assert tree.tokens[:6] == [6, 7, 8, 2, 3, 4][:budget]


def test_each_row_gets_no_more_than_it_may() -> None:
    """Catches a budget taken from the neighbour, and a row without any."""
    drafter, rows = _drafter([[1, 2, 3, 1, 2, 3, 1], [4, 5, 6], [7, 8, 9]])
    for gamma in ([3, 0, 20], [0, 0, 0], [31, 1, 2]):
        draft = step(drafter, rows, gamma, _cycle)
        assert all(
            length <= limit for length, limit in zip(draft.lengths.tolist(), gamma, strict=True)
        )


def test_all_columns_run_with_as_many_nodes_as_the_settings_have() -> None:
    """Catches a number too small for its own settings: then the right end of the window would never
    run."""
    settings = LookaheadSettings(ngram=4, window=3, guesses=2)
    drafter, rows = _drafter(
        [[1, 2, 3, 4, 9, 1, 5, 6, 7, 11, 1, 8, 12, 13, 14, 1]], ngram=4, window=3, guesses=2
    )
    draft = drafter.propose(rows, [settings.num_nodes])
    (nodes,) = _nodes_by_parent(draft)
    assert None not in drafter._rows[0].window.ends(nodes)


def test_window_finds_ngrams_that_were_never_emitted() -> None:
    """Catches a harvest of wrong n-grams: in the orbit's first lap nothing repeats, so only the
    window can know the future."""
    drafter, rows = _drafter([[5, 14, 2, 11, 1]], pool_from_text=False)
    row = rows[0]
    while len(row.output) < 12:
        step(drafter, rows, [23], _cycle)
    orbit = [1]
    for _ in range(15):
        orbit.append(_cycle(orbit[-1]))
    assert row.output[:12] == orbit[1:13]
    assert row.stats.accepted >= 4
    for start in orbit:
        # tokens a guess followed: each the target's own choice
        for rest in drafter._rows[0].pool.after(start):
            assert rest[-1] == _cycle(rest[-2])


def test_text_ngrams_are_complete_across_steps() -> None:
    """Catches n-grams lost at the seam between two steps."""
    drafter, rows = _drafter([[1]], window=1)
    for _ in range(5):
        step(drafter, rows, [0], _cycle)
    text = rows[0].tokens
    for start in range(len(text) - 3):
        assert tuple(text[start + 1 : start + 4]) in drafter._rows[0].pool.after(text[start])


def test_rows_keep_their_own_state() -> None:
    """Catches state that stays behind when a row leaves: the last row must take its own window
    along."""
    drafter, rows = _drafter([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    alone, single = _drafter([[9, 10, 11, 12]])
    for _ in range(3):
        step(drafter, rows, [24] * 3, _cycle)
        step(alone, single, [24], _cycle)
    rows.swap_remove(0)
    drafter.stop(0)
    assert (
        drafter.propose(rows, [24, 24]).tokens[0].tolist()[:5]
        == alone.propose(single, [24]).tokens[0].tolist()[:5]
    )
    assert drafter._rows[0].window.columns == alone._rows[0].window.columns


def test_guesses_are_the_favourites_at_the_columns_ends() -> None:
    """Catches outputs read one node off (output 0 follows the pending token, output 1 + i follows
    node i)."""
    drafter, rows = _drafter([[3, 9, 1, 4]], pool_from_text=False)
    before = [list(column) for column in drafter._rows[0].window.columns]
    draft = drafter.propose(rows, [24])
    assert target_logits(rows, draft, _cycle).argmax(-1)[0, 0] == _cycle(4)
    step(drafter, rows, [24], _cycle)
    taken = rows[0].stats.emitted
    for old, new in zip(before[taken - 1 :], drafter._rows[0].window.columns, strict=False):
        assert new[1:] == [*old[1:], _cycle(old[-1])][1:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ngram": 1}, "ngram must be at least 2"),
        ({"window": 0}, "window"),
        ({"ngram": 9, "window": 9}, "at most 64"),
    ],
)
def test_settings_are_checked(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LookaheadSettings(**settings)


def test_too_few_nodes_for_anything_are_refused() -> None:
    """Catches a drafter that is paid for and can never propose: no column fits, and the text is not
    pooled."""
    target: Any = SimpleNamespace(lm=SimpleNamespace(kernels=None))
    for pool_from_text, ngram in ((True, 4), (False, 3)):
        LookaheadDrafter.build(
            DraftSetup(target, None, 1, LookaheadSettings(ngram, pool_from_text=pool_from_text))
        )
    with pytest.raises(ConfigError, match="at least ngram - 2 = 2 draft tokens, got 1"):
        LookaheadDrafter.build(
            DraftSetup(target, None, 1, LookaheadSettings(ngram=4, pool_from_text=False))
        )
