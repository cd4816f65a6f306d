"""The drafter that learns, without a model: what it proposes after what it has seen."""

from __future__ import annotations

from outrider_phrases.learned import LearnedPhraseDrafter, LearnedSettings

from outrider.testing import make_row, make_rows


def drafter(**settings: int) -> LearnedPhraseDrafter:
    return LearnedPhraseDrafter(LearnedSettings(**settings))


def proposals(ours: LearnedPhraseDrafter, texts: list[list[int]], budget: int) -> list[list[int]]:
    """The chain that is drafted for each text, once the drafter has been told of all."""
    rows = make_rows(ours, texts)
    draft = ours.propose(rows, [budget] * len(rows))
    tokens, lengths = draft.lists
    return [chain[:length] for chain, length in zip(tokens, lengths, strict=True)]


def test_what_followed_most_often_is_drafted() -> None:
    """Of all rows: the second one knows what the first one holds."""
    texts = [[1, 2, 3, 1, 2, 4, 1, 2, 3], [9, 1, 2]]
    assert proposals(drafter(context=2), texts, 4) == [[1, 2, 3, 1], [3, 1, 2, 3]]
    assert proposals(drafter(context=2), texts, 0) == [[], []]
    assert proposals(drafter(context=4), [[1, 2]], 4) == [[]]


def test_a_row_that_comes_back_teaches_nothing_twice() -> None:
    """It made room for another one in the middle of its answer: `num_learned` tokens are known."""
    ours = drafter(context=1)
    rows = make_rows(ours, [[1, 2, 1, 2, 1, 3], [1, 3]])
    assert ours._followers[1,].most_common() == [(2, 2), (3, 2)]
    row = rows.swap_remove(0)
    ours.stop(0)
    row.num_learned = len(row.tokens)
    ours.join(rows, row)
    assert ours._followers[1,].most_common() == [(2, 2), (3, 2)]
    row.tokens += [1]
    ours.start(make_row(row.tokens))  # another text with the same beginning does teach
    assert ours._followers[1,].most_common() == [(2, 4), (3, 3)]


def test_state_of_rows_follows_them() -> None:
    """By swap-remove, as rows leave."""
    ours = drafter()
    rows = make_rows(ours, [[1], [1, 2], [1, 2, 3]])
    rows.swap_remove(0)
    ours.stop(0)
    assert list(ours._num_learned) == [3, 2]


def test_the_oldest_contexts_are_forgotten() -> None:
    ours = drafter(context=1, max_entries=2)
    make_rows(ours, [[1, 2, 3, 4]])
    assert list(ours._followers) == [(2,), (3,)]
