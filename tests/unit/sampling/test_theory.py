"""Closed forms against direct simulation of their model and against the paper's numbers."""

from __future__ import annotations

import random

import pytest

from outrider.errors import ConfigError
from outrider.sampling.theory import speedup, tau


def test_tau_counts_the_bonus() -> None:
    assert tau(0.0, 5) == 1
    assert tau(1.0, 5) == 6
    assert tau(0.8, 5) == pytest.approx((1 - 0.8**6) / 0.2)


def test_speedups_of_leviathans_table() -> None:
    """Table 1 of 2211.17192: alpha .6 gamma 2 -> 1.96x at c = 0; alpha .8 gamma 5 -> 3.69x; alpha
    .9 gamma 10 -> 6.86x."""
    for alpha, k, gain in ((0.6, 2, 1.96), (0.8, 5, 3.69), (0.9, 10, 6.86)):
        assert speedup(tau(alpha, k), k, c=0.0) == pytest.approx(gain, abs=0.005)


def test_wide_passes_and_draft_tokens_cost() -> None:
    assert speedup(3.0, k=4, c=0.1) == pytest.approx(3 / 1.4)
    assert speedup(3.0, k=4, c=0.1, wide_pass=1.6) == pytest.approx(1.5)


def test_tau_is_what_steps_emit() -> None:
    rng = random.Random(0)
    steps = 40_000
    tokens = 0
    for _ in range(steps):
        tokens += 1 + next((i for i in range(5) if rng.random() >= 0.7), 5)
    assert tau(0.7, 5) == pytest.approx(tokens / steps, rel=0.01)


@pytest.mark.parametrize(
    ("alpha", "k", "c"), [(1.1, 3, 0.1), (-0.1, 3, 0.1), (0.5, -1, 0.1), (0.5, 3, -0.1)]
)
def test_out_of_range_is_refused(alpha: float, k: int, c: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        speedup(tau(alpha, k), k, c)
