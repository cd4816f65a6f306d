"""The one formula: against a simulated clock, Leviathan's closed form, and beyond what was
measured."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.errors import ConfigError
from outrider.lab.predict import (
    CostPoints,
    StepCosts,
    break_even,
    predict,
    predict_best,
    survival_of,
)
from outrider.sampling.theory import speedup, tau

FLAT = CostPoints.of({1: 0.02, 20: 0.02})
BENT = CostPoints.of({1: 0.020, 4: 0.023, 8: 0.031})
positive = st.floats(1e-4, 10)
curves = st.dictionaries(st.integers(1, 40), positive, min_size=1, max_size=8).map(CostPoints.of)


def test_between_points_are_straight_lines() -> None:
    assert BENT.seconds(4) == (pytest.approx(0.023), False)
    assert BENT.seconds(3) == (pytest.approx(0.022), False)
    assert BENT.seconds(6) == (pytest.approx(0.027), False)


def test_after_the_points_the_last_line_continues_and_says_so() -> None:
    assert BENT.seconds(10) == (pytest.approx(0.035), True)
    assert CostPoints.of({3: 1.0}).seconds(9) == (1.0, True)
    assert CostPoints.of({4: 1.0, 8: 1.2}).seconds(2) == (pytest.approx(0.9), True)


def test_below_the_points_a_token_never_costs_more_than_its_share() -> None:
    """The line through (4, 1) and (8, 3) is negative at 1; a pass over 4 tokens is no worse than
    four passes over 1."""
    assert CostPoints.of({4: 1.0, 8: 3.0}).seconds(1) == (pytest.approx(0.25), True)


def test_the_clock_may_fall_the_curve_does_not() -> None:
    noisy = CostPoints.of({1: 0.020, 2: 0.024, 3: 0.022, 4: 0.030})
    assert [noisy.seconds(count)[0] for count in (1, 2, 3, 4)] == pytest.approx(
        [0.020, 0.023, 0.023, 0.030]
    )


@given(curve=curves, count=st.integers(1, 60))
def test_curves_are_positive_and_never_fall(curve: CostPoints, count: int) -> None:
    here = curve.seconds(count)[0]
    there = curve.seconds(count + 1)[0]
    assert 0 < here <= there * (1 + 1e-9)


@given(curve=curves)
def test_points_survive_a_file(curve: CostPoints) -> None:
    """In order, whatever the order they came in; the fit, which is kept, is no part of it."""
    curve.seconds(5)
    again = CostPoints.model_validate_json(curve.model_dump_json())
    assert again.points == curve.points
    assert [point.num_tokens for point in curve.points] == sorted(
        point.num_tokens for point in curve.points
    )


def test_points_are_checked() -> None:
    for wrong in (
        [],
        [{"num_tokens": 0, "seconds": 1}],
        [{"num_tokens": 1, "seconds": 0}],
        [{"num_tokens": 1, "seconds": 1}] * 2,
    ):
        with pytest.raises(ValidationError):
            CostPoints.model_validate({"points": wrong})


@given(alpha=st.floats(0, 1), k=st.integers(0, 12), c=st.floats(0, 2))
def test_flat_costs_and_one_alpha_are_leviathan(alpha: float, k: int, c: float) -> None:
    costs = StepCosts(target=FLAT, draft_s_per_token=c * 0.02)
    prediction = predict([alpha], costs, k)
    assert prediction.speedup == pytest.approx(tau(alpha, k) / (k * c + 1))
    assert prediction.tau == pytest.approx(tau(alpha, k))


@given(k=st.integers(1, 12), c=st.floats(0, 1.5))
def test_at_break_even_nothing_is_gained(k: int, c: float) -> None:
    costs = StepCosts(target=BENT, draft_s_per_token=c * 0.02)
    alpha = break_even(costs, k)
    if alpha is None:
        assert predict([1.0], costs, k).speedup < 1
    else:
        assert predict([alpha], costs, k).speedup == pytest.approx(1)


def test_nothing_breaks_even_without_a_draft() -> None:
    assert break_even(StepCosts(target=BENT), 0) is None
    # Corollary 3.9
    assert break_even(StepCosts(target=FLAT, draft_s_per_token=0.006), 1) == pytest.approx(0.3)


def test_every_cost_counts_once() -> None:
    """By hand: a pass of 0.023 s and 3 x 0.002 s of drafting against 0.020 s."""
    costs = StepCosts(target=BENT, draft_s_per_token=0.002, num_rows=4)
    prediction = predict([0.8, 0.75, 0.5 / 0.6], costs, 3)
    assert prediction.tau == pytest.approx(2.9)
    assert prediction.step_cost == pytest.approx(0.029 / 0.020)
    assert prediction.speedup == pytest.approx(2.9 * 0.020 / 0.029)
    assert costs.step_s(3) == (pytest.approx(0.029), False)
    assert prediction.speedup == pytest.approx(speedup(2.9, 3, c=0.1, wide_pass=1.15))


def test_a_simulated_clock_agrees() -> None:
    """20000 steps with acceptance by position, each step timed by its costs."""
    acceptance = [0.9, 0.5, 0.8, 0.8]
    rng = random.Random(1)
    steps = 20_000
    tokens = 0
    for _ in range(steps):
        tokens += 1 + next(
            (i for i, probability in enumerate(acceptance) if rng.random() >= probability), 4
        )
    costs = StepCosts(target=BENT, draft_s_per_token=0.003)
    seconds = steps * (0.025 + 4 * 0.003)  # 0.025: between the points of 4 and 8 tokens
    prediction = predict(acceptance, costs, 4)
    assert prediction.speedup == pytest.approx(tokens / seconds * 0.020, rel=0.02)


def test_what_was_stretched_is_flagged() -> None:
    costs = StepCosts(target=BENT)
    assert not predict([0.8, 0.6], costs, 2).extrapolated
    assert predict([0.8] * 12, costs, 8).extrapolated
    without_plain = StepCosts(target=CostPoints.of({2: 1.0, 4: 1.0}))
    assert predict([0.8], without_plain, 2).extrapolated


def test_survival_continues_like_its_last_position() -> None:
    assert survival_of([0.9, 0.5], 3) == pytest.approx([0.9, 0.45, 0.225])
    assert survival_of([0.9, 0.5], 1) == [0.9]
    assert survival_of([0.5], 0) == []


@pytest.mark.parametrize("acceptance", [[], [1.1], [0.5, -0.1], [float("nan")]])
def test_what_is_no_acceptance_is_refused(acceptance: list[float]) -> None:
    with pytest.raises(ConfigError):
        survival_of(acceptance, 1)


def test_the_best_length_is_the_best_and_of_equals_the_shortest() -> None:
    costs = StepCosts(target=BENT, draft_s_per_token=0.002)
    best = predict_best([0.8], costs, 12)
    assert best.speedup == max(predict([0.8], costs, k).speedup for k in range(13))
    assert predict_best([0.0], StepCosts(target=FLAT), 12).num_draft_tokens == 0


def test_whole_steps_are_costs() -> None:
    """Seconds by drafted tokens, as a sweep over lengths times them."""
    costs = StepCosts.of_steps({0: 0.020, 2: 0.030, 4: 0.040}, num_rows=2)
    assert costs.step_s(3) == (pytest.approx(0.035), False)
    assert predict([0.5], costs, 2).speedup == pytest.approx(1.75 * 0.020 / 0.030)
