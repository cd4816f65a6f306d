"""When a step waits for a draft, and when none is asked for: on a clock of its own."""

from __future__ import annotations

import pytest

from outrider.remote.draft.text import FIRST_REST, LONGEST_REST, MAX_MISSED, DraftWait, Rests


def test_a_budget_is_a_pass() -> None:
    """The budget is the median of the latest passes, and never more than the setting."""
    patience = DraftWait(None)
    bounded = DraftWait(0.003)
    for seconds in (0.01, 0.02, 5.0):
        patience.passes.add(seconds)
        bounded.passes.add(seconds)
    assert patience.budget_s == 0.02
    assert bounded.budget_s == 0.003


@pytest.mark.parametrize(
    ("asked", "silent_since", "now", "deadline", "expected"),
    [
        (0.0, 0.0, 0.001, 0.02, True),  # usually after 10 ms
        (0.0, 0.0, 0.001, 0.008, False),  # too late for this step
        (0.0, 0.0, 0.02, 0.02, False),  # the time is up
        (0.0, 0.0, 0.015, 0.04, True),  # a little late is no reason
        (0.1, 0.0, 0.1, 0.14, False),  # silent for ten times as long as usual
    ],
)
def test_expectations(
    asked: float, silent_since: float, now: float, deadline: float, expected: bool
) -> None:
    """Replies take 10 ms."""
    patience = DraftWait(None)
    patience.replies.add(0.01)
    assert patience.expects(asked, silent_since, now, deadline) is expected


def test_the_first_reply_is_waited_for_once() -> None:
    """An unknown reply time is waited for once, for a step's budget, and then no more."""
    patience = DraftWait(None)
    patience.passes.add(0.02)
    assert patience.expects(1.0, 1.0, 1.01, 1.02)
    assert not patience.expects(1.03, 1.0, 1.03, 1.05)


def test_rests_grow_and_end_with_a_draft() -> None:
    """A service that never has a draft gets few requests in a thousand steps; after one draft,
    every step asks again."""
    rests = Rests()
    asked = []
    for _ in range(1000):
        asked.append(not rests.is_resting)
        rests.observe(had_any=False)
    assert all(asked[:MAX_MISSED])
    assert not any(asked[MAX_MISSED : MAX_MISSED + FIRST_REST])
    assert asked[MAX_MISSED + FIRST_REST]
    assert 3 <= sum(asked[-3 * LONGEST_REST :]) <= 12
    while rests.is_resting:
        rests.observe(had_any=False)
    rests.observe(had_any=True)
    for _ in range(MAX_MISSED - 1):
        rests.observe(had_any=False)
        assert not rests.is_resting


def test_a_reply_may_be_a_pass_late() -> None:
    """Threads that take turns on a busy machine make a reply many times as late as usual: less than
    a pass is no silence."""
    patience = DraftWait(None)
    patience.replies.add(0.001)
    patience.passes.add(0.02)
    assert patience.expects(0.0, 0.0, 0.015, 0.02)
    assert not patience.expects(0.05, 0.0, 0.05, 0.07)
