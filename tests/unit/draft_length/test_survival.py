"""Expected kept tokens, from verdicts alone."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from outrider.draft_length.survival import DECAY, PRIOR, ChainSurvival, KeptNodes, Shares


def chain_of(alphas: list[float], drafted: int, steps: int = 3000, seed: int = 0) -> ChainSurvival:
    """Many steps of one row whose i-th token is kept with probability alphas[i]; averaged over the memory's end."""
    rng, survival = random.Random(seed), ChainSurvival()
    for _ in range(steps):
        survival.observe(0, drafted, next((i for i in range(drafted) if rng.random() >= alphas[i]), drafted))
    return survival


def test_before_anything_is_seen_there_is_a_prior() -> None:
    assert ChainSurvival().curve(3) == pytest.approx([PRIOR, PRIOR**2, PRIOR**3])
    assert ChainSurvival().expected(0) == 0


def test_the_curve_is_the_products_of_the_conditionals() -> None:
    """Averaged over seeds, as one memory is only some 50 steps long."""
    alphas = [0.9, 0.5, 0.8]
    curves = [chain_of(alphas, 3, seed=seed, steps=400).curve(3) for seed in range(40)]
    means = [sum(values) / 40 for values in zip(*curves, strict=True)]
    assert means == pytest.approx([0.9, 0.45, 0.36], abs=0.04)


def test_depths_never_seen_lean_on_the_last_one_seen() -> None:
    curve = chain_of([0.5, 0.5], 2).curve(6)
    ratios = [deep / shallow for shallow, deep in itertools.pairwise(curve[1:])]
    assert ratios == pytest.approx([curve[1] / curve[0]] * 4, abs=0.01)


def test_a_depth_given_up_long_ago_gets_another_chance() -> None:
    """Or a controller would never go back to long drafts after one bad passage."""
    survival = ChainSurvival()
    for _ in range(50):
        survival.observe(0, 4, 1)  # the second token is always wrong
    assert survival.curve(2)[1] < 0.1
    for _ in range(300):
        survival.observe(0, 1, 1)
    assert survival.curve(2)[1] > 0.9


def test_untested_tokens_count_for_nothing() -> None:
    """Tokens behind the first rejection were not decided on."""
    survival = ChainSurvival()
    for _ in range(500):
        survival.observe(0, 8, 0)
    curve = survival.curve(2)
    assert curve[0] < 0.01
    survival = ChainSurvival()
    survival.observe(0, 8, 1)
    assert survival.curve(3)[2] / survival.curve(3)[1] == pytest.approx(survival.curve(3)[1] / survival.curve(3)[0])


def test_a_row_is_scaled_by_its_own_luck() -> None:
    survival = ChainSurvival()
    for _ in range(200):
        survival.observe(1, 4, 4)
        survival.observe(2, 4, 0)
    assert survival.expected(4, 1) > survival.expected(4) > survival.expected(4, 2)
    assert all(0 <= value <= 1 for value in survival.curve(4, 1))
    assert survival.expected(4, 3) == survival.expected(4)
    survival.forget({2})
    assert survival.expected(4, 1) == survival.expected(4)
    assert survival.expected(4, 2) < survival.expected(4)


# ------------------------------------------------ chains and trees by what is asked for


def seen(shares: list[float], sizes: list[int], steps: int, seed: int = 0) -> KeptNodes:
    """What was seen of trees whose nodes are kept in such shares of the steps, each by itself."""
    estimate, rng = KeptNodes(), random.Random(seed)
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
    """Catches longer drafts believed by a logarithm, too little for a chain whose tokens are nearly all kept."""
    estimate, rng = KeptNodes(), random.Random(0)
    for _ in range(200):
        kept = next((depth for depth in range(5) if rng.random() >= alpha), 5)
        estimate.fade(1)
        estimate.observe(5, kept, range(1, kept + 1))
    assert estimate.expected(8)[8] == pytest.approx(sum(alpha**depth for depth in range(1, 9)), rel=0.12)


def test_a_node_never_kept_does_not_hide_those_behind_it() -> None:
    """The order of nodes is a guess: a useless part's may stand before a good one's."""
    expected = seen([0.8, 0.0, 0.5], [3], 200).expected(3)
    assert expected[3] - expected[2] > 0.25  # the truth: 0.5


def test_a_size_given_up_long_ago_gets_another_chance() -> None:
    estimate = seen([0.9, 0.0], [2], 100)
    assert estimate.expected(2)[2] - estimate.expected(2)[1] < 0.1
    for _ in range(300):
        estimate.fade(1)
        estimate.observe(1, 1, [1])
    assert estimate.expected(2)[2] - estimate.expected(2)[1] > 0.4


def test_many_rows_know_more_and_forget_no_faster() -> None:
    """A step of 32 rows is one step: half of what was kept 10 steps ago is still known, and one odd row changes little."""
    crowd, alone = KeptNodes(), KeptNodes()
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
    assert expected[(size + 1) // 2] == pytest.approx(1.5 * math.log((size + 1) // 2 + 1) / math.log(size + 1), rel=0.05)


def test_shares_of_positions_fade_together() -> None:
    shares = Shares([2.0], [4.0])
    shares.fade(2)
    shares.add(2, [1.0])
    assert shares.counts(3) == [pytest.approx((2 * DECAY**2 + 1, 4 * DECAY**2 + 1)), (0.0, 1.0), (0.0, 0.0)]
