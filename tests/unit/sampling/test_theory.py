"""Closed forms against direct simulation of their model and against the papers' numbers."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError
from outrider.sampling.theory import acceptance_rate, best_gamma, break_even_alpha, predicted_speedup, tau


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


def test_best_gamma_and_break_even() -> None:
    assert best_gamma(0.05, 0.2) == 0
    assert best_gamma(0.9, 0.01) > best_gamma(0.6, 0.01) > 0
    assert break_even_alpha(1, 0.3) == pytest.approx(0.3)
    edge = break_even_alpha(4, 0.1)
    assert edge is not None
    assert predicted_speedup(edge, 4, 0.1) == pytest.approx(1)
    assert break_even_alpha(4, 1.2) is None
    assert break_even_alpha(0, 0.1) is None


def test_acceptance_rate_is_one_minus_tv() -> None:
    p, q = torch.rand(3, 7).softmax(-1), torch.rand(3, 7).softmax(-1)
    torch.testing.assert_close(acceptance_rate(p, q), 1 - 0.5 * (p - q).abs().sum(-1))


@pytest.mark.parametrize(
    ("alpha", "gamma", "c"), [(1.1, 3, 0.1), (-0.1, 3, 0.1), (0.5, -1, 0.1), (0.5, 3, -0.1)]
)
def test_out_of_range_is_refused(alpha: float, gamma: int, c: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        predicted_speedup(alpha, gamma, c)
