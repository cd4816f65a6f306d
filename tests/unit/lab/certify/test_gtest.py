"""The statistics: calibrated under the right distribution, as powerful as stated under a wrong one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.lab.certify.certify import DETECTED, CertifyPlan
from outrider.lab.certify.certify_result import FALSE_ALARMS, POWER
from outrider.lab.certify.gtest import (
    MIN_EXPECTED,
    GStatistic,
    PositionTable,
    cells,
    detectable,
    holm,
    noncentrality,
    quantiles,
)

V = 60


def distributions(seed: int, count: int = 25, spread: float = 1.5) -> np.ndarray:
    """(count, V) random distributions."""
    weights = np.exp(spread * np.random.default_rng(seed).normal(size=(count, V)))
    return weights / weights.sum(axis=1, keepdims=True)


def statistic(num: int, df: int) -> GStatistic:
    return GStatistic(
        num_draws=num, num_uncertain=num, num_cells=df + 1, g=0.0, df=df, p_value=1.0, impossible=0
    )


def table_of(
    seed: int, true: np.ndarray, claimed: np.ndarray, draft: np.ndarray, max_draws: int = 150
) -> PositionTable:
    """Draws from `true` tested against `claimed`, some distributions often and some rarely."""
    rng = np.random.default_rng(seed)
    table = PositionTable()
    for number, (probs, expected, guess) in enumerate(zip(true, claimed, draft, strict=True)):
        table.add(
            expected,
            rng.choice(V, size=max(2, max_draws // (number + 1)), p=probs).tolist(),
            rng,
            guess,
        )
    return table


@pytest.mark.slow
def test_p_values_are_uniform_under_the_right_distribution() -> None:
    """Catches a wrong number of degrees of freedom, cells chosen by what was drawn, and quantiles
    that are not uniform."""
    own = distributions(1, 8)
    draft = distributions(2, 8)
    tables = [table_of(seed, own, own, draft) for seed in range(1500)]
    for found in ([table.tokens() for table in tables], [table.preference() for table in tables]):
        p_values = np.array([one.p_value for one in found])
        assert stats.kstest(p_values, "uniform").pvalue > 1e-2
        # more than that a right test has once in a thousand times: 0.068 and 0.0187
        for level in (0.05, 0.01):
            assert (p_values < level).sum() <= stats.binom.ppf(0.999, len(p_values), level)


def test_power_is_as_stated() -> None:
    """A distribution at the stated total variation is found at least as often as promised, in both
    views."""
    own = distributions(1, 1, 0.5)[0]
    draft = distributions(2, 1, 0.5)[0]
    rng = np.random.default_rng(0)
    level = 1e-3
    power = 0.9
    num = 2000
    disliked = np.argsort(draft / own)[: V // 2]
    wrong = own.copy()
    wrong[disliked] *= 0.835  # what these lose, the others gain
    wrong += (
        (1 - wrong.sum())
        * np.where(np.isin(np.arange(V), disliked), 0, own)
        / (1 - own[disliked].sum())
    )
    promised = max(detectable(statistic(num, df), level, power) for df in (V - 1, 9))
    assert promised <= 0.5 * np.abs(wrong - own).sum() < 1.2 * promised
    found = []
    for _ in range(150):
        table = PositionTable()
        table.add(own, rng.choice(V, size=num, p=wrong).tolist(), rng, draft)
        found.append([table.tokens().p_value < level, table.preference().p_value < level])
    assert (np.mean(found, axis=0) >= power - 0.05).all(), np.mean(found, axis=0)


def test_a_bias_towards_the_draft_shows_in_the_order_of_its_preference() -> None:
    """The reason for the second view: resampling from p, spread over a flat distribution, hides
    from single tokens."""
    p = distributions(1, spread=0.3)
    q = distributions(2, spread=0.3)
    kept = np.minimum(p, q)
    emitted = kept + (1 - kept.sum(axis=1, keepdims=True)) * p  # the classic bug, one token
    table = table_of(0, emitted, p, q, max_draws=400)
    assert table.preference().p_value < 1e-4 < table.tokens().p_value


def test_tokens_of_probability_zero_end_the_matter() -> None:
    probs = np.array([0.5, 0.5, 0.0])
    table = PositionTable()
    table.add(probs, [0] * 20 + [1] * 20 + [2], np.random.default_rng(0))
    assert table.impossible == 1
    assert table.tokens().p_value == 0


def test_a_certain_distribution_has_nothing_to_test() -> None:
    table = PositionTable()
    table.add(np.array([1.0, 0.0]), [0] * 50, np.random.default_rng(0), np.array([0.5, 0.5]))
    found = table.tokens()
    assert (found.df, found.p_value, found.num_draws, found.num_uncertain) == (0, 1.0, 50, 0)
    assert table.preference() is None
    # one wrong token is enough
    assert (1 - detectable(found, 1e-3, 0.9)) ** 50 == pytest.approx(0.1)
    assert detectable(PositionTable().tokens(), 1e-3, 0.9) is None


def test_a_nearly_certain_distribution_goes_by_quantiles() -> None:
    """0.98 and 0.02, 100 draws: two cells are too many. A sampler that is wrong every tenth time
    must be seen all the same."""
    probs = np.array([0.98, 0.02])
    rng = np.random.default_rng(0)
    table = PositionTable()
    for _ in range(4):  # as many beginnings
        table.add(probs, [0] * 90 + [1] * 10, rng)
    assert table.groups == []
    assert table.tokens().p_value < 1e-6


@given(st.integers(0, 10_000), st.integers(1, 400), st.floats(0.1, 4))
@settings(max_examples=60, deadline=None)
def test_cells_hold_everything_once(seed: int, num: int, spread: float) -> None:
    """Nothing lost, nothing twice, no cell expected too rarely unless it is the only one."""
    probs = distributions(seed, 1, spread)[0]
    tokens = np.random.default_rng(seed).choice(V, size=num, p=probs)
    observed, expected = cells(probs, tokens)
    assert observed.sum() == num
    assert expected.sum() == pytest.approx(num)
    assert len(expected) == 1 or expected.min() >= MIN_EXPECTED - 1e-9


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_quantiles_follow_their_order(seed: int) -> None:
    """A token's quantile lies in its own interval, behind all tokens of higher score."""
    probs = distributions(seed, 1)[0]
    score = distributions(seed + 1, 1)[0]
    found = quantiles(probs, np.arange(V), np.random.default_rng(seed), score)
    before = np.array([probs[score > score[token]].sum() for token in range(V)])
    assert (np.array(found) >= before - 1e-12).all()
    assert (np.array(found) <= before + probs + 1e-12).all()


def test_holm_steps_down() -> None:
    """0.004 passes 0.05 / 4, 0.016 passes 0.05 / 3, 0.03 misses 0.05 / 2, and 0.04 behind it is not
    asked."""
    assert holm([0.03, 0.004, 0.04, 0.016], 0.05) == [False, True, False, True]
    assert holm([], 0.05) == []


def test_more_samples_find_less() -> None:
    found = [detectable(statistic(num, 20), 1e-4, 0.9) for num in (100, 400, 1600)]
    assert found[0] > found[1] > found[2]
    assert found[1] == pytest.approx(2 * found[2])


def test_the_default_number_of_samples_keeps_the_promise() -> None:
    """And not by being needlessly many."""
    needed = math.ceil(noncentrality(40, FALSE_ALARMS / 24, POWER) / (4 * DETECTED**2))
    assert 0.9 * CertifyPlan().samples < needed <= CertifyPlan().samples
    assert detectable(statistic(needed, 40), FALSE_ALARMS / 24, POWER) == pytest.approx(
        DETECTED, rel=1e-3
    )


def test_certain_draws_dilute_what_must_be_found_elsewhere() -> None:
    """A deviation of 0.2 in a tenth of the draws is one of 0.02 on average."""
    few = statistic(400, 20)
    among_many = replace(statistic(400, 20), num_draws=4000)
    assert detectable(among_many, 1e-4, 0.9) == pytest.approx(detectable(few, 1e-4, 0.9) / 10)


def test_a_few_impossible_tokens_can_be_tolerated() -> None:
    """Where passes differ by rounding, top-p may keep a token in one of them and not in the other."""
    table = PositionTable()
    probs = np.array([0.5, 0.5, 0.0])
    table.add(probs, [0] * 500 + [1] * 498 + [2] * 2, np.random.default_rng(0))
    assert table.tokens().p_value == 0
    assert table.tokens(0.01).p_value > 0.5
