"""Expected kept tokens of chains, from verdicts alone."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.draft_length.survival import PRIOR, Phase
from outrider.drafters.chain_survival import ChainSurvival


def chain_of(alphas: list[float], drafted: int, steps: int = 3000, seed: int = 0) -> ChainSurvival:
    """Many steps of one row whose i-th token is kept with probability alphas[i]; averaged over the
    memory's end."""
    rng = random.Random(seed)
    survival = ChainSurvival()
    for _ in range(steps):
        survival.observe(
            0, drafted, next((i for i in range(drafted) if rng.random() >= alphas[i]), drafted)
        )
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
    assert survival.curve(3)[2] / survival.curve(3)[1] == pytest.approx(
        survival.curve(3)[1] / survival.curve(3)[0]
    )


def test_a_row_is_scaled_by_its_own_luck() -> None:
    survival = ChainSurvival()
    for _ in range(200):
        survival.observe(1, 4, 4)
        survival.observe(2, 4, 0)
    assert survival.expected(4, 1) > survival.expected(4) > survival.expected(4, 2)
    assert all(0 <= value <= 1 for value in survival.curve(4, 1))
    assert survival.expected(4, 3) == survival.expected(4)
    survival.begin_step({2: Phase()})
    assert survival.expected(4, 1) == survival.expected(4)
    assert survival.expected(4, 2) < survival.expected(4)
