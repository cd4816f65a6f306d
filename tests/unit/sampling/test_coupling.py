"""The Gumbel-max theorem, which the oracle of exact distributions takes as given: integrated and
sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from outrider.sampling.rng import KeyedStreams, gumbel_choice


def test_the_winner_has_distribution_p_by_integration() -> None:
    """P(v wins) = integral of the density of log p(v) + g at x times P(all others below x)."""
    p = np.array([0.5, 0.3, 0.15, 0.05])

    def wins(v: int) -> float:
        def density(x: float) -> float:
            others = sum(p[u] for u in range(4) if u != v)
            z = x - np.log(p[v])
            return np.exp(-z - np.exp(-z)) * np.exp(-others * np.exp(-x))

        return integrate.quad(density, -8, 40, epsabs=1e-13, limit=400)[0]

    assert [wins(v) for v in range(4)] == pytest.approx(p, abs=1e-10)


def test_the_choice_has_distribution_p() -> None:
    """Seeded chi-square, 4000 positions of one stream, zero-mass tokens among them; false alarm
    1e-6."""
    p = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.0, 0.1], dtype=torch.float64)
    noise = KeyedStreams([3]).gumbel(torch.arange(4000)[None], 6)
    counts = torch.bincount(gumbel_choice(p.expand(1, 4000, 6), noise)[0], minlength=6)
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0].numpy(), 4000 * p[p > 0].numpy()).pvalue > 1e-6


def test_shared_noise_agrees_at_least_as_often_as_promised() -> None:
    """P(agree) >= (1 - TV)/(1 + TV); bound minus 5 standard errors of 4000 races."""
    p = torch.tensor([0.5, 0.3, 0.2])
    q = torch.tensor([0.3, 0.5, 0.2])
    noise = KeyedStreams([5]).gumbel(torch.arange(4000)[None], 3)
    agree = (
        gumbel_choice(p.expand(1, 4000, 3), noise) == gumbel_choice(q.expand(1, 4000, 3), noise)
    ).double()
    tv = 0.2
    assert float(agree.mean()) > (1 - tv) / (1 + tv) - 5 * 0.5 / 4000**0.5


def test_a_point_mass_always_wins() -> None:
    p = torch.nn.functional.one_hot(torch.tensor([2, 0]), 4).float()[None]
    noise = KeyedStreams([1]).gumbel(torch.tensor([[0, 1]]), 4)
    assert gumbel_choice(p, noise).tolist() == [[2, 0]]
