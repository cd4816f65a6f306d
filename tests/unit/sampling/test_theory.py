"""Closed forms against direct simulation of their model and against the papers' numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.sampling.theory import (
    alpha_of,
    alpha_of_tau,
    break_even_alpha,
    envelope_speedup,
    predicted_speedup,
    survival_of,
    tau,
    tau_of,
)


def test_tau_counts_the_bonus() -> None:
    assert tau(0.0, 5) == 1
    assert tau(1.0, 5) == 6
    assert tau(0.8, 5) == pytest.approx((1 - 0.8**6) / 0.2)


def test_speedups_of_leviathans_table() -> None:
    """Table 1 of 2211.17192: alpha .6 gamma 2 -> 1.96x at c = 0; alpha .8 gamma 5 -> 3.69x; alpha .9 gamma
    10 -> 6.86x.
    """
    for alpha, gamma, speedup in ((0.6, 2, 1.96), (0.8, 5, 3.69), (0.9, 10, 6.86)):
        assert predicted_speedup(alpha, gamma, 0.0) == pytest.approx(speedup, abs=0.005)


def test_break_even() -> None:
    assert break_even_alpha(1, 0.3) == pytest.approx(0.3)
    edge = break_even_alpha(4, 0.1)
    assert edge is not None
    assert predicted_speedup(edge, 4, 0.1) == pytest.approx(1)
    assert break_even_alpha(4, 1.2) is None
    assert break_even_alpha(0, 0.1) is None


@pytest.mark.parametrize(("alpha", "gamma", "c"), [(1.1, 3, 0.1), (-0.1, 3, 0.1), (0.5, -1, 0.1), (0.5, 3, -0.1)])
def test_out_of_range_is_refused(alpha: float, gamma: int, c: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        predicted_speedup(alpha, gamma, c)


@given(alpha=st.floats(0, 1), gamma=st.integers(1, 12))
def test_survival_of_one_alpha_is_the_closed_form(alpha: float, gamma: int) -> None:
    survival = survival_of([alpha], gamma)
    assert tau_of(survival) == pytest.approx(tau(alpha, gamma))
    assert alpha_of(survival) == pytest.approx(alpha)


def test_survival_multiplies_and_the_last_acceptance_goes_on() -> None:
    assert survival_of([0.9, 0.5], 4) == pytest.approx([0.9, 0.45, 0.225, 0.1125])
    assert survival_of([0.9, 0.5], 1) == [0.9]
    assert survival_of([0.9], 0) == []


def test_alpha_of_counts_tested_tokens_only() -> None:
    """Against counters of a simulated chain: a token behind the first rejection is not tested."""
    acceptance, rng = [0.9, 0.4, 0.7], random.Random(0)
    accepted = tested = 0
    for _ in range(40_000):
        kept = next((i for i, value in enumerate(acceptance) if rng.random() >= value), len(acceptance))
        accepted, tested = accepted + kept, tested + min(kept + 1, len(acceptance))
    assert alpha_of(survival_of(acceptance, 3)) == pytest.approx(accepted / tested, abs=0.005)


@given(alpha=st.floats(0.01, 1), gamma=st.integers(1, 12))
def test_alpha_of_tau_inverts_tau(alpha: float, gamma: int) -> None:
    assert alpha_of_tau(tau(alpha, gamma) - 1e-12, gamma) == pytest.approx(alpha, abs=1e-6)


def test_alpha_of_tau_has_limits() -> None:
    assert alpha_of_tau(1.0, 3) == pytest.approx(0.0)
    assert alpha_of_tau(4.0, 3) == pytest.approx(1.0)
    assert alpha_of_tau(4.01, 3) is None
    assert alpha_of_tau(1.0, 0) is None


def test_the_envelope_is_leviathan_without_the_targets_own_token() -> None:
    alpha, gamma, c = 0.8, 5, 0.1
    kept = tau(alpha, gamma) - 1
    assert envelope_speedup(kept, gamma, c) == pytest.approx(predicted_speedup(alpha, gamma, c) - 1 / (gamma * c + 1))
    assert envelope_speedup(4, 4, 0.25) == 2.0  # all kept: 4 T / (4 T / 4 + T)
    assert envelope_speedup(0, 0, 0.5) == 1.0


@pytest.mark.parametrize("call", [
    lambda: survival_of([], 3), lambda: survival_of([0.9, 1.1], 3), lambda: alpha_of_tau(2, -1),
    lambda: envelope_speedup(3.5, 3, 0.1), lambda: envelope_speedup(-0.1, 3, 0.1), lambda: envelope_speedup(1, 3, -0.1),
    lambda: break_even_alpha(3, -0.1), lambda: predicted_speedup(0.5, 3, float("nan")),
])  # fmt: skip
def test_nonsense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        call()
