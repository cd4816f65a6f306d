"""Predictions from measured curves: against a simulated clock, Leviathan's closed form, and beyond what was measured."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.errors import ConfigError
from outrider.lab.estimate.curves import (
    EXAMPLE,
    CostPoints,
    StepCosts,
    break_even,
    extended,
    predict,
    predict_best,
    read_costs,
)
from outrider.sampling.theory import break_even_alpha, predicted_speedup, survival_of, tau

FLAT = CostPoints.of({1: 0.02, 20: 0.02})
BENT = CostPoints.of({1: 0.020, 4: 0.023, 8: 0.031})
positive = st.floats(1e-4, 10)
curves = st.dictionaries(st.integers(1, 40), positive, min_size=1, max_size=8).map(CostPoints.of)


def test_between_points_are_straight_lines() -> None:
    assert BENT.seconds(4) == (pytest.approx(0.023), False)
    assert BENT.seconds(3) == (pytest.approx(0.022), False)
    assert BENT.seconds(6) == (pytest.approx(0.027), False)


def test_beyond_the_points_the_last_line_goes_on_and_says_so() -> None:
    assert BENT.seconds(10) == (pytest.approx(0.035), True)
    assert CostPoints.of({3: 1.0}).seconds(9) == (1.0, True)
    assert CostPoints.of({4: 1.0, 8: 1.2}).seconds(2) == (pytest.approx(0.9), True)


def test_below_the_points_a_token_never_costs_more_than_its_share() -> None:
    """The line through (4, 1) and (8, 3) is negative at 1; a pass over 4 tokens is no worse than four passes over 1."""
    assert CostPoints.of({4: 1.0, 8: 3.0}).seconds(1) == (pytest.approx(0.25), True)


def test_the_clock_may_fall_the_curve_does_not() -> None:
    noisy = CostPoints.of({1: 0.020, 2: 0.024, 3: 0.022, 4: 0.030})
    assert [noisy.seconds(count)[0] for count in (1, 2, 3, 4)] == pytest.approx([0.020, 0.023, 0.023, 0.030])
    assert noisy.correction == pytest.approx(0.023 / 0.022 - 1)
    assert BENT.correction == 0


@given(curve=curves, count=st.integers(1, 60))
def test_curves_are_positive_and_never_fall(curve: CostPoints, count: int) -> None:
    here, there = curve.seconds(count)[0], curve.seconds(count + 1)[0]
    assert 0 < here <= there * (1 + 1e-9)


@given(curve=curves)
def test_points_survive_a_file(curve: CostPoints) -> None:
    """In order, whatever the order they came in; the fit, which is kept, is no part of it."""
    curve.seconds(5)
    again = CostPoints.model_validate_json(curve.model_dump_json())
    assert again.points == curve.points
    assert [point.num_tokens for point in curve.points] == sorted(point.num_tokens for point in curve.points)


def test_points_are_checked() -> None:
    for wrong in (
        [],
        [{"num_tokens": 0, "seconds": 1}],
        [{"num_tokens": 1, "seconds": 0}],
        [{"num_tokens": 1, "seconds": 1}] * 2,
    ):
        with pytest.raises(ValidationError):
            CostPoints.model_validate({"points": wrong})


@given(alpha=st.floats(0, 1), gamma=st.integers(0, 12), c=st.floats(0, 2))
def test_flat_costs_and_one_alpha_are_leviathan(alpha: float, gamma: int, c: float) -> None:
    costs = StepCosts(target=FLAT, draft_s_per_token=c * 0.02)
    found = predict(survival_of([alpha], 12), costs, gamma)
    assert found.speedup == pytest.approx(predicted_speedup(alpha, gamma, c))
    assert found.tau == pytest.approx(tau(alpha, gamma))
    if gamma:
        edge = break_even_alpha(gamma, c)
        assert break_even(costs, gamma) == (None if edge is None else pytest.approx(edge, abs=1e-6))


def test_every_cost_counts_once() -> None:
    """By hand: 0.023 pass + 0.004 + 3 x 0.002 drafting + 0.001 overhead; plain 0.020 + 0.0005."""
    costs = StepCosts(
        target=BENT, draft_s_per_token=0.002, draft_fixed_s=0.004, overhead_s=0.001, plain_overhead_s=0.0005, num_rows=4
    )
    found = predict([0.8, 0.6, 0.5], costs, 3)
    assert found.tau == pytest.approx(2.9)
    assert found.step_s == pytest.approx(0.034)
    assert found.tokens_per_s == pytest.approx(4 * 2.9 / 0.034)
    assert found.speedup == pytest.approx(2.9 * 0.0205 / 0.034)
    assert costs.step_s(0) == (pytest.approx(0.0205), False)
    assert costs.relative(3) == pytest.approx(0.034 / 0.0205)


def test_a_simulated_clock_agrees() -> None:
    """20000 steps with acceptance by position, each step timed by its costs."""
    acceptance, rng, gamma = [0.9, 0.5, 0.8, 0.8], random.Random(1), 4
    costs = StepCosts(target=BENT, draft_s_per_token=0.003, overhead_s=0.002)
    tokens, steps = 0, 20_000
    for _ in range(steps):
        tokens += 1 + next((i for i, value in enumerate(acceptance) if rng.random() >= value), gamma)
    seconds = steps * (0.025 + 4 * 0.003 + 0.002)
    found = predict(survival_of(acceptance, 4), costs, gamma)
    assert found.tokens_per_s == pytest.approx(tokens / seconds, rel=0.02)
    assert found.speedup == pytest.approx(tokens / seconds * 0.020, rel=0.02)


def test_what_was_stretched_is_flagged() -> None:
    costs = StepCosts(target=BENT)
    inside = predict([0.8, 0.6], costs, 2)
    assert (inside.cost_extrapolated, inside.survival_extrapolated) == (False, False)
    assert predict([0.8] * 12, costs, 8).cost_extrapolated
    assert predict([0.8, 0.6], costs, 3).survival_extrapolated
    assert predict(
        [0.8], StepCosts(target=CostPoints.of({2: 1.0, 4: 1.0})), 2
    ).cost_extrapolated  # the plain pass is not known


def test_survival_goes_on_like_its_last_position() -> None:
    assert extended([0.8, 0.4], 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert extended([0.8], 3) == pytest.approx([0.8, 0.64, 0.512])
    assert extended([0.8, 0.4], 1) == [0.8]
    assert extended([0.5, 0.0], 3) == [0.5, 0.0, 0.0]
    assert extended([0.0], 2) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("survival", "gamma"), [([0.5, 0.6], 2), ([1.1], 1), ([-0.1], 1), ([], 1), ([0.5], -1), ([float("nan")], 1)]
)
def test_what_is_no_survival_curve_is_refused(survival: list[float], gamma: int) -> None:
    with pytest.raises(ConfigError):
        predict(survival, StepCosts(target=BENT), gamma)


def test_the_best_length_is_the_best_and_ties_are_short() -> None:
    costs = StepCosts(target=BENT, draft_s_per_token=0.002)
    survival = survival_of([0.8], 12)
    best = predict_best(survival, costs, 12)
    assert best == max((predict(survival, costs, gamma) for gamma in range(13)), key=lambda one: one.tokens_per_s)
    assert predict_best([0.0], StepCosts(target=FLAT), 12).num_draft_tokens == 0
    assert predict_best([0.0], StepCosts(target=FLAT), 12, min_gamma=1).num_draft_tokens == 1


def test_whole_steps_need_nothing_beside() -> None:
    """Seconds by drafted tokens, as a sweep over lengths times them."""
    costs = StepCosts.of_steps({0: 0.020, 2: 0.030, 4: 0.040}, num_rows=2)
    assert costs.step_s(3) == (pytest.approx(0.035), False)
    assert predict([0.5, 0.25], costs, 2).speedup == pytest.approx(1.75 * 0.020 / 0.030)
    with pytest.raises(ValidationError, match="already"):
        StepCosts(target=BENT, whole_steps=True, overhead_s=0.001)


def test_costs_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(EXAMPLE)
    costs = read_costs(file)
    assert costs.draft_s_per_token == 0.002
    assert [point.seconds for point in costs.target.points] == [0.020, 0.024]
    file.write_text(costs.model_dump_json())
    assert read_costs(file) == costs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "the whole"),
        ('{"target": {"points": []}}', "target.points"),
        (json.dumps({**json.loads(EXAMPLE), "draft_ms": 2}), "draft_ms"),
        (json.dumps({**json.loads(EXAMPLE), "overhead_s": -1}), "overhead_s"),
        ('{"kind": "bench"}', "result of kind 'bench'"),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="num_tokens") as caught:  # each message shows the form
        read_costs(file)
    assert message in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_costs(tmp_path / "none.json")
