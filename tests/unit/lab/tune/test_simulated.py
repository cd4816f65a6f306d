"""Whole tunings on machines that are not there."""

from __future__ import annotations

from statistics import fmean

import pytest

from tools.tune_simulation.simulate import rehearse


def test_a_rehearsal_is_repeatable_and_costs_little() -> None:
    first, second = rehearse(3, prompts=16, max_tokens=24), rehearse(3, prompts=16, max_tokens=24)
    assert first == second
    assert 0.5 < first.of_best <= 1.05
    assert first.cost_share < 0.2


@pytest.mark.nightly
@pytest.mark.parametrize("greedy", [True, False])
def test_the_choice_reaches_what_was_promised(greedy: bool) -> None:
    """At the noise that was seen: 0.97 of the truly best on average, and no worse than trying everything on the same prompts,
    for less than a tenth of the price. The seeds are fixed."""
    found = [rehearse(seed, greedy=greedy) for seed in range(30)]
    assert fmean(one.of_best for one in found) >= 0.97
    assert fmean(one.of_exhaustive for one in found) >= 0.99
    assert fmean(one.cost_share for one in found) < 0.08
    assert max(one.cost_share for one in found) < 0.1
