"""From traces to numbers: the same tokens on both sides, depths that were tested, times that add
up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lab.bench.notes import depth_counts, notes_of, pair
from outrider.lab.runner import Step, Trace
from tests.unit.lab.bench.fakes import OVERHEAD_S, trace_of

PLAIN = trace_of([1] * 8, [0.5] + [0.01] * 7)


def with_steps(*steps: Step) -> Trace:
    trace = trace_of([1], [0.1])
    return Trace(trace.completion, list(steps), trace.began_s, 0.0)


def step(tokens: int, path: list[int], *, complete: bool, parents: list[int] | None = None) -> Step:
    return Step(
        0, tokens, [5] * tokens, parents, None, path, 5, complete, len(path) + 1, 1, 0.1, 1.0
    )


def test_both_sides_are_timed_over_the_same_tokens() -> None:
    """The first speculative step brings 3 tokens for nothing: plain decoding is not charged for
    them."""
    found = pair(PLAIN, trace_of([3, 3, 2], [0.6, 0.02, 0.02]))
    assert found.tokens == 5
    assert (found.plain_s, found.own_s) == pytest.approx((0.05, 0.04))
    assert (found.plain_all_s, found.own_all_s) == pytest.approx((0.57, 0.64))
    assert found.parting is None


def test_texts_of_different_lengths_are_cut_to_the_shorter_one() -> None:
    found = pair(PLAIN, trace_of([3, 3, 4], [0.6, 0.02, 0.02], tokens=[*range(7), 9, 9, 9]))
    assert found.tokens == 5
    assert found.own_s == pytest.approx(0.02 + 0.02 / 2)  # 2 of the last step's 4 tokens
    assert found.own_all_s == pytest.approx(0.6 + 0.03)
    assert found.parting is not None
    assert (found.parting.position, found.parting.plain, found.parting.own) == (7, [7], [9, 9, 9])


def test_a_text_that_ends_early_parts_at_its_end() -> None:
    found = pair(PLAIN, trace_of([2, 2], [0.6, 0.02])).parting
    assert found is not None
    assert (found.position, found.plain, found.own) == (4, [4, 5, 6, 7], [])


def test_nothing_behind_the_first_step_is_no_decoding() -> None:
    found = pair(trace_of([1, 1], [0.5, 0.01]), trace_of([4], [0.6]))
    assert (found.tokens, found.plain_s, found.own_s) == (0, 0, 0)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_equal_speed_is_a_speedup_of_one(plain: list[int], own: list[int]) -> None:
    """Both need 10 ms a token: however the tokens are cut into steps, and wherever the texts end."""
    left, right = (
        trace_of(takes, [0.5, *(0.01 * taken for taken in takes[1:])]) for takes in (plain, own)
    )
    found = pair(left, right)
    assert found.plain_s == pytest.approx(found.own_s) == pytest.approx(0.01 * found.tokens)


def test_depths_of_chains() -> None:
    """3 of 4 kept and rejected there; all of 2 kept; none of 1; a step without a draft says
    nothing."""
    steps = (
        step(4, [0, 1, 2], complete=False),
        step(2, [0, 1], complete=True),
        step(1, [], complete=False),
        step(0, [], complete=True),
    )
    reached, kept, drafts = depth_counts(with_steps(*steps))
    assert (reached, kept, drafts) == ([3, 2, 1, 1], [2, 2, 1, 0], 3)


def test_depths_of_trees() -> None:
    """Two children at the root, one below the second: kept down to the leaf, then turned down at
    the root."""
    parents = [-1, -1, 1]
    steps = (
        step(3, [1, 2], complete=True, parents=parents),
        step(3, [], complete=False, parents=parents),
    )
    assert depth_counts(with_steps(*steps)) == ([2, 1], [1, 1], 2)


def test_a_group_is_noted_row_by_row() -> None:
    rows = [
        trace_of([3, 3, 2], [0.6, 0.02, 0.02], rows=2, drafted=[2, 4, 1]),
        trace_of([3, 1, 4], [0.6, 0.02, 0.02], rows=2),
    ]
    first, second = notes_of(rows, 4, [7, 9], turn=2, attempts=3, group=5)
    assert (
        first.configuration,
        first.prompt,
        first.round,
        first.group,
        first.attempts,
        second.prompt,
    ) == (
        4,
        7,
        2,
        5,
        3,
        9,
    )
    assert (first.widths, second.widths, first.shared) == ([4, 3], [4, 3], True)
    assert (first.tokens, first.steps, first.decode_tokens) == (8, 3, 5)
    assert first.decode_s == pytest.approx(0.04)
    assert first.gaps_s == pytest.approx([0.02, 0.02])


def test_times_of_a_group_add_up_to_its_wall_time() -> None:
    rows = [trace_of([3, 3, 2], [0.6, 0.02, 0.02], rows=2) for _ in range(2)]
    notes = notes_of(rows, 0, [0, 1], 0, 1)
    total = {phase: sum(note.time_s[phase] for note in notes) for phase in notes[0].time_s}
    assert sum(total.values()) == pytest.approx(notes[0].wall_s) == pytest.approx(0.64)
    assert total["prompt"] == pytest.approx(0.4 * 0.6)
    assert total["target"] == pytest.approx(0.6 * 0.6 + 0.04 - 3 * OVERHEAD_S)
    assert total["other"] == pytest.approx(3 * OVERHEAD_S)


def test_steps_in_which_a_row_is_missing_have_no_width() -> None:
    """The second row ends first; what a step costs is reported of full batches."""
    long = trace_of([3, 3, 2], [0.6, 0.02, 0.02], rows=2)
    short = trace_of([3, 3], [0.6, 0.02], rows=2)
    alone = Trace(
        long.completion, [*long.steps[:-1], replace(long.steps[-1], rows=1)], long.began_s, 0.0
    )
    assert [note.widths for note in notes_of([alone, short], 0, [0, 1], 0, 1)] == [[2, None], [2]]
