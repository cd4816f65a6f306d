"""Expected kept nodes, from verdicts alone."""

from __future__ import annotations

import math
import random

import pytest

from outrider.draft_length.survival import DECAY, PRIOR, KeptNodes, Shares


def seen(shares: list[float], sizes: list[int], steps: int, seed: int = 0) -> KeptNodes:
    """What was seen of trees whose nodes are kept in such shares of the steps, each by itself."""
    estimate = KeptNodes()
    rng = random.Random(seed)
    for step in range(steps):
        size = sizes[step % len(sizes)]
        kept = [node for node, share in enumerate(shares[:size], 1) if rng.random() < share]
        estimate.fade(1)
        estimate.observe(size, len(kept), kept)
    return estimate


def test_before_anything_is_seen_kept_nodes_grow_like_the_logarithm() -> None:
    one, three, seven = (KeptNodes().expected(7)[size] for size in (1, 3, 7))
    assert one == pytest.approx(PRIOR)
    assert 1.5 * one < three < 3 * one
    assert 1.2 * three < seven < 2 * three


def test_a_tree_tells_what_every_smaller_one_keeps() -> None:
    """One size asked for, all below it known, whatever their curve."""
    estimate = seen([0.9, 0.1, 0.6, 0.05], [4], 200)
    assert estimate.expected(4) == pytest.approx([0, 0.9, 1.0, 1.6, 1.65], abs=0.2)


@pytest.mark.parametrize("alpha", [0.6, 0.95])
def test_nodes_beyond_fall_as_the_ones_before(alpha: float) -> None:
    """Catches longer drafts believed by a logarithm, too little for a chain whose tokens are nearly
    all kept."""
    estimate = KeptNodes()
    rng = random.Random(0)
    for _ in range(200):
        kept = next((depth for depth in range(5) if rng.random() >= alpha), 5)
        estimate.fade(1)
        estimate.observe(5, kept, range(1, kept + 1))
    assert estimate.expected(8)[8] == pytest.approx(
        sum(alpha**depth for depth in range(1, 9)), rel=0.12
    )


def test_a_node_never_kept_does_not_hide_those_behind_it() -> None:
    """The order of nodes is a guess: a useless part's may stand before a good one's."""
    expected = seen([0.8, 0.0, 0.5], [3], 200).expected(3)
    assert expected[3] - expected[2] > 0.25  # the truth: 0.5


def test_one_kept_node_after_a_long_pause_does_not_outweigh_all_before() -> None:
    """Catches evidence that fades to nothing: after 500 plain steps one lucky probe would promise
    that drafts of eight nodes are kept."""
    estimate = seen([0.1], [1], 100)
    before = estimate.expected(1)[1]
    estimate.fade(500)
    estimate.observe(1, 1, [1])
    assert before < estimate.expected(1)[1] < 0.5
    assert estimate.expected(8)[8] < 2


def test_a_size_given_up_long_ago_gets_another_chance() -> None:
    estimate = seen([0.9, 0.0], [2], 100)
    assert estimate.expected(2)[2] - estimate.expected(2)[1] < 0.1
    for _ in range(300):
        estimate.fade(1)
        estimate.observe(1, 1, [1])
    assert estimate.expected(2)[2] - estimate.expected(2)[1] > 0.4


def test_many_rows_know_more_and_forget_no_faster() -> None:
    """A step of 32 rows is one step: half of what was kept 10 steps ago is still known, and one odd
    row changes little."""
    crowd = KeptNodes()
    alone = KeptNodes()
    for _ in range(100):
        crowd.fade(1)
        alone.fade(1)
        alone.observe(1, 1, [1])
        for row in range(32):
            crowd.observe(1, row % 2, [1] * (row % 2))
    levels = [estimate.expected(1)[1] for estimate in (crowd, alone)]
    assert levels == pytest.approx([0.5, 1.0], abs=0.01)
    for estimate in (crowd, alone):
        estimate.fade(1)
        estimate.observe(1, 0, [])
    assert levels[0] - crowd.expected(1)[1] < 0.002
    assert levels[1] - alone.expected(1)[1] > 0.01


@pytest.mark.parametrize("size", [1, 5, 16])
def test_a_tree_that_does_not_say_which_node_came_when_is_right_at_its_size(size: int) -> None:
    """And its kept nodes lie below it like the logarithm, not all at its beginning or its end."""
    estimate = KeptNodes()
    for step in range(200):
        estimate.fade(1)
        estimate.observe(size, 1 + step % 2, None)
    expected = estimate.expected(16)
    assert expected[size] == pytest.approx(1.5, rel=0.02)
    assert expected[(size + 1) // 2] == pytest.approx(
        1.5 * math.log((size + 1) // 2 + 1) / math.log(size + 1), rel=0.05
    )


def test_shares_of_positions_fade_together() -> None:
    shares = Shares([2.0], [4.0])
    shares.fade(2)
    shares.add(2, [1.0])
    assert shares.counts(3) == [
        pytest.approx((2 * DECAY**2 + 1, 4 * DECAY**2 + 1)),
        (0.0, 1.0),
        (0.0, 0.0),
    ]
