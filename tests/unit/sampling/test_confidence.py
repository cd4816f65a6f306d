"""Stop rules: when they stop, and that they look at nothing they must not."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.errors import ConfigError
from outrider.sampling.confidence import ConfidenceSettings, StopRule, acceptance_bound


def test_the_bound_is_pinskers() -> None:
    """A point mass bounds by 1, the uniform distribution over V by 1 - sqrt(weight log V), never
    below 0."""
    assert acceptance_bound(torch.eye(5)[0], 0.2) == 1
    assert acceptance_bound(torch.full((5,), 0.2), 0.2) == pytest.approx(
        1 - math.sqrt(0.2 * math.log(5))
    )
    assert acceptance_bound(torch.full((10**6,), 1e-6), 0.2) == 0


def test_entropy_stops_before_and_stays_stopped() -> None:
    rule = StopRule(ConfidenceSettings(stop="entropy", stop_below=0.5), 2, torch.device("cpu"))
    sure = torch.eye(4)[0]
    unsure = torch.full((4,), 0.25)
    rule.before(torch.stack([sure, unsure]))
    assert rule.going.tolist() == [True, False]
    rule.before(torch.stack([sure, sure]))
    # the drawn token itself never matters here
    rule.after(torch.stack([unsure, unsure]), torch.tensor([0, 0]))
    assert rule.going.tolist() == [True, False]


def test_product_stops_after_the_token_that_goes_under() -> None:
    rule = StopRule(ConfidenceSettings(stop="product", stop_below=0.3), 1, torch.device("cpu"))
    probs = torch.tensor([[0.6, 0.4]])
    rule.before(probs)
    rule.after(probs, torch.tensor([0]))
    assert rule.going.tolist() == [True]
    rule.before(probs)
    assert rule.going.tolist() == [True], "a distribution alone must not stop it"
    rule.after(probs, torch.tensor([1]))  # 0.6 * 0.4 < 0.3
    assert rule.going.tolist() == [False]


def test_a_text_that_ends_is_not_drafted_on() -> None:
    """Catches a rule that drops the end itself, one row's end that stops another, and rules without
    a threshold of their own."""
    for stop in ("entropy", "product"):
        rule = StopRule(
            ConfidenceSettings(stop=stop, stop_below=0.0),
            3,
            torch.device("cpu"),
            ends=[{3}, set(), {1, 2}],
        )
        probs = torch.full((3, 4), 0.25)
        rule.before(probs)
        rule.after(probs, torch.tensor([0, 3, 3]))
        assert rule.going.tolist() == [True, True, True]
        rule.before(probs)
        rule.after(probs, torch.tensor([3, 3, 2]))
        assert rule.going.tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [{"stop_below": 1.5}, {"entropy_weight": 0.0}])
def test_ranges(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ConfidenceSettings(**bad)
