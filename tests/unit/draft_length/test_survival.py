"""Expected kept tokens, from verdicts alone."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from outrider.draft_length.survival import DECAY, PRIOR, ChainSurvival, NestedYield, Outcome, Shares, TreeYield


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


def test_doubt_makes_news_count() -> None:
    """The mean stays, its weight goes."""
    sure, doubting = (chain_of([0.1], 1) for _ in range(2))
    before = doubting.curve(1)
    doubting.doubt(2.0)
    assert doubting.curve(1) == pytest.approx(before, abs=1e-4)
    for survival in (sure, doubting):
        survival.observe(0, 1, 1)
        survival.observe(0, 1, 1)
    assert doubting.curve(1)[0] > 0.5 > 0.3 > sure.curve(1)[0]


@pytest.mark.parametrize("kind", [ChainSurvival, TreeYield])
def test_many_rows_know_more_and_forget_no_faster(kind: type[ChainSurvival | TreeYield]) -> None:
    """A step of 32 rows is one step: half of what was kept 10 steps ago is still known, and one odd row changes little."""
    crowd, alone = kind(), kind()
    for _ in range(100):
        crowd.observe_all({Outcome(1, 0): 16, Outcome(1, 1): 16}, 1)
        alone.observe_all({Outcome(1, 1): 1}, 1)
    level = crowd.expected_of([1])[0]
    assert level == pytest.approx(0.5, abs=0.03)
    crowd.observe_all({Outcome(1, 1): 1}, 1)
    assert crowd.expected_of([1])[0] == pytest.approx(level, abs=0.002)
    before = alone.expected_of([1])[0]
    alone.observe_all({Outcome(1, 0): 1}, 1)
    assert alone.expected_of([1])[0] < before - 0.01


@pytest.mark.parametrize("kind", [ChainSurvival, TreeYield, NestedYield])
def test_steps_learned_from_at_once_tell_what_they_tell_one_by_one(kind: type[ChainSurvival | TreeYield | NestedYield]) -> None:
    """Catches counts that are lost, and steps that do not fade."""
    rng, together, single = random.Random(3), kind(), kind()
    for batch in range(200):
        alpha = 0.9 if batch < 180 else 0.5  # what was before must be forgotten in both
        kept = [next((depth for depth in range(4) if rng.random() >= alpha), 4) for _ in range(8)]
        outcomes = [Outcome(4, count, count == 4, tuple(range(1, count + 1))) for count in kept]
        together.observe_all(Counter(outcomes), 8)
        for outcome in outcomes:
            single.observe_all({outcome: 1}, 1)
    assert together.expected_of([1, 4]) == pytest.approx(single.expected_of([1, 4]), rel=0.05)


@pytest.mark.parametrize("estimate", [ChainSurvival(), TreeYield()])
def test_several_sizes_at_once_are_the_same_numbers(estimate: ChainSurvival | TreeYield) -> None:
    rng = random.Random(1)
    for _ in range(100):
        estimate.observe_all({Outcome(4, rng.randint(0, 4)): 1}, 1)
    sizes = [0, 1, 4, 9]
    assert estimate.expected_of(sizes) == pytest.approx([estimate.expected(size) for size in sizes])
    assert estimate.expected(0) == 0


# ------------------------------------------------ shares that fade untouched


def test_shares_fade_as_if_each_place_was_touched() -> None:
    """Thousands of steps: weights that grow are scaled down on the way. Catches a scaling that changes what is known."""
    rng, shares, plain = random.Random(2), Shares(), [[0.0, 0.0] for _ in range(6)]
    for step in range(3000):
        tried = rng.randint(0, 5)
        kept = [place for place in range(tried) if rng.random() < 0.6]
        shares.fade()
        shares.add(tried, kept)
        for place, pair in enumerate(plain):
            pair[0] = DECAY * pair[0] + (place in kept)
            pair[1] = DECAY * pair[1] + (place < tried)
        if step % 700 == 0:
            shares.limit(2.5)
            for pair in plain:
                factor = min(1.0, 2.5 / pair[1]) if pair[1] else 1.0
                pair[:] = [factor * pair[0], factor * pair[1]]
    assert [list(pair) for pair in shares.counts(6)] == [pytest.approx(pair) for pair in plain]


# ------------------------------------------------ trees


def test_an_unseen_tree_grows_like_the_logarithm() -> None:
    assert TreeYield().expected(7) == pytest.approx(PRIOR * math.log2(8))


@pytest.mark.parametrize("bend", [0.0, 0.5, 1.0])
def test_sizes_between_and_beyond_follow_the_curve(bend: float) -> None:
    estimate = TreeYield()
    for _ in range(200):
        for size in (2, 16):
            estimate.observe_all({Outcome(size, 2 * math.log2(1 + size) ** bend): 1}, 1)
    for size in (2, 6, 16, 32):
        assert estimate.expected(size) == pytest.approx(2 * math.log2(1 + size) ** bend, rel=0.1)


def test_a_size_seen_often_speaks_for_itself() -> None:
    """A tree whose yield no curve of the family describes."""
    estimate = TreeYield()
    for _ in range(300):
        for size, kept in ((4, 1.0), (8, 3.0), (16, 3.0)):
            estimate.observe_all({Outcome(size, kept): 1}, 1)
    assert estimate.expected(8) - estimate.expected(4) > 1.0


def test_all_sizes_fade_together() -> None:
    """An old yield at another size must not hold down the news."""
    estimate = TreeYield()
    for _ in range(100):
        estimate.observe_all({Outcome(16, 0.2): 1}, 1)
    for _ in range(300):
        estimate.observe_all({Outcome(4, 2.0): 1}, 1)
    assert estimate.expected(16) > 2.0


def test_a_few_unlucky_trees_do_not_say_that_more_nodes_bring_nothing() -> None:
    """Catches a text's unlucky beginning that keeps `auto` at single nodes, all but one in ten of them kept, for sixty steps."""
    known = TreeYield()
    for size, kept in ((4, 1), (4, 0), (3, 1), (3, 2), (2, 0), (1, 1), (1, 0)):
        known.observe_all({Outcome(size, kept): 1}, 1)
    for step in range(20):
        known.observe_all({Outcome(1, int(step % 10 > 0)): 1}, 1)
    one, two, four = known.expected_of([1, 2, 4])
    assert two > 1.25 * one
    assert four > 1.5 * one


def thin(size: int, alpha: float, steps: int, seed: int = 0) -> TreeYield:
    """What was seen of trees with one node at each depth."""
    estimate, rng = TreeYield(), random.Random(seed)
    for _ in range(steps):
        kept = next((depth for depth in range(size) if rng.random() >= alpha), size)
        estimate.observe_all({Outcome(size, kept, kept == size): 1}, 1)
    return estimate


def test_trees_that_run_out_want_more_nodes() -> None:
    """Catches `auto` that stays with five nodes, nearly always all kept, where eight would be, too: it lost a sixth on code."""
    assert thin(5, 0.98, 60).expected(8) > 6.5  # the truth: 7.3
    assert thin(5, 0.7, 60).expected(8) < 3.0  # the truth: 2.2; by the logarithm 2.4


def test_trees_that_seldom_run_out_are_as_they_were() -> None:
    """Bushy trees end at a sibling, not at their depth: that says nothing against more nodes."""
    seldom, unasked = TreeYield(), TreeYield()
    rng = random.Random(1)
    for _ in range(100):
        kept = rng.randint(0, 3)
        seldom.observe_all({Outcome(8, kept, False): 1}, 1)
        unasked.observe_all({Outcome(8, kept, rng.random() < 0.1): 1}, 1)
    assert seldom.expected(16) == pytest.approx(unasked.expected(16))


# ------------------------------------------------ trees that grow node by node


def nested(shares: Sequence[float], sizes: Sequence[int], steps: int, seed: int = 0) -> NestedYield:
    """What was seen of trees whose nodes are kept in such shares of the steps, each by itself."""
    estimate, rng = NestedYield(), random.Random(seed)
    for step in range(steps):
        size = sizes[step % len(sizes)]
        kept = tuple(node for node, share in enumerate(shares[:size], 1) if rng.random() < share)
        estimate.observe_all({Outcome(size, len(kept), budgets=kept): 1}, 1)
    return estimate


def test_a_tree_tells_what_every_smaller_one_keeps() -> None:
    """One size asked for, all below it known, whatever their curve."""
    estimate = nested([0.9, 0.1, 0.6, 0.05], [4], 200)
    assert estimate.expected_of([0, 1, 2, 3, 4]) == pytest.approx([0, 0.9, 1.0, 1.6, 1.65], abs=0.15)


@pytest.mark.parametrize("alpha", [0.6, 0.95])
def test_nodes_beyond_fall_as_the_ones_before(alpha: float) -> None:
    """Catches larger trees believed by a logarithm, too much for thin trees often wrong, too little for others."""
    estimate = NestedYield()
    rng = random.Random(0)
    for _ in range(200):
        kept = next((depth for depth in range(5) if rng.random() >= alpha), 5)
        estimate.observe_all({Outcome(5, kept, budgets=tuple(range(1, kept + 1))): 1}, 1)
    assert estimate.expected_of([8])[0] == pytest.approx(sum(alpha**depth for depth in range(1, 9)), rel=0.1)


def test_a_node_never_kept_does_not_hide_those_behind_it() -> None:
    """The order of nodes is a guess: a useless part's may stand before a good one's."""
    estimate = nested([0.8, 0.0, 0.5], [3], 200)
    assert estimate.expected_of([3])[0] - estimate.expected_of([2])[0] > 0.3  # the truth: 0.5


def test_news_of_a_nested_tree_is_believed_soon_once_the_old_is_doubted() -> None:
    estimate = nested([0.9] * 4, [4], 200)
    estimate.doubt(2.5)
    for _ in range(5):
        estimate.observe_all({Outcome(4, 0, budgets=()): 1}, 1)
    assert estimate.expected_of([4])[0] < 1.5
