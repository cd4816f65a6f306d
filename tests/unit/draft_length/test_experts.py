"""Distinct experts by nodes: what was seen, what lies between, and texts that share more."""

from __future__ import annotations

import math

import pytest

from outrider.draft_length.costs import LengthCosts
from outrider.draft_length.experts import SHARING, ExpertsByNodes


def read(nodes: int, sharing: float = 0.6) -> float:
    """Distinct experts of a text, eight a token."""
    return float(8 * (1 + nodes) ** sharing)


def test_sizes_that_were_seen_and_others() -> None:
    experts = ExpertsByNodes()
    experts.observe(0, 8.0)
    assert experts.expected(3) == pytest.approx(8 * 4**SHARING), "a guess"
    for _ in range(20):
        for nodes in (2, 8):
            experts.observe(nodes, read(nodes))
    assert [experts.expected(n) for n in (0, 2, 5, 8)] == pytest.approx(
        [read(n) for n in (0, 2, 5, 8)], rel=0.02
    )


def test_a_text_that_shares_more_does_at_all_sizes() -> None:
    """Catches sizes that know nothing of each other: the text changed, and only one was seen since."""
    experts = ExpertsByNodes()
    experts.observe(0, 8.0)
    for _ in range(30):
        for nodes in (2, 8):
            experts.observe(nodes, read(nodes))
    before = experts.expected(8)
    for _ in range(60):
        experts.observe(2, read(2, 0.4))
    assert experts.expected(2) == pytest.approx(read(2, 0.4), rel=0.02)
    assert experts.expected(8) < 0.85 * before


def test_another_number_of_rows_begins_with_how_tokens_share() -> None:
    experts = ExpertsByNodes()
    for _ in range(30):
        experts.observe(0, 8.0)
        experts.observe(4, read(4, 0.4))
    other = experts.copy()
    other.observe(0, 20.0)
    assert other.expected(4) < 0.9 * 20 * 5**SHARING


def test_costs_follow_the_experts_of_the_text() -> None:
    """Timed where tokens share little; then a text comes that shares much, and only plain steps and
    short drafts are seen: long ones must look cheaper, too, by what their experts cost."""
    costs = LengthCosts(8)
    for step in range(1, 300):
        size = (0, 1, 2, 4, 8)[step % 5]
        costs.observe(size, read(size, 0.7) ** 0.9, step, experts=read(size, 0.7))
    assert costs.drafted()[8] / costs.drafted()[0] == pytest.approx(9 ** (0.7 * 0.9), rel=0.05)
    for step in range(300, 400):
        size = (0, 2)[step % 2]
        costs.observe(size, read(size, 0.3) ** 0.9, step, experts=read(size, 0.3))
    assert costs.drafted()[8] / costs.drafted()[0] < 0.75 * 9 ** (0.7 * 0.9)


def test_no_experts_cost_nothing() -> None:
    """A target that is no mixture has the costs that it had."""
    costs = LengthCosts(4)
    for step in range(1, 50):
        costs.observe(step % 3, 1 + 0.1 * (step % 3), step, experts=None)
    assert costs.expected_experts() == []
    assert costs.drafted()[2] / costs.drafted()[0] == pytest.approx(1.2, rel=0.02)
    assert not math.isnan(costs.asked()[4])
