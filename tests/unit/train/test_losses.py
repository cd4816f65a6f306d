"""Losses: values by hand, what they share (0 at q = p, gradients), reduced vocabularies, sums by
name."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.errors import ConfigError
from outrider.train.losses import (
    LOSSES,
    acceptance,
    parse_loss,
    smooth_l1,
    softmax_fp32,
    target_distributions,
    weighted_mean,
)

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.3, 0.5])


def kl(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * (a / b).log()).sum())


BY_HAND = {
    "kl": kl(P, Q),
    "reverse_kl": kl(Q, P),
    "jsd": (kl(P, (P + Q) / 2) + kl(Q, (P + Q) / 2)) / 2,
    "tv": 0.3,
    "ce": -float((P * Q.log()).sum()),
    "nla": -math.log(0.7),
    "lk_hybrid": math.exp(-2.1) * kl(P, Q) + (1 - math.exp(-2.1)) * 0.3,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_values_by_hand(name: str) -> None:
    """A sign, a swapped p and q, a forgotten half."""
    assert float(LOSSES[name](P, Q.log())) == pytest.approx(BY_HAND[name], abs=1e-5)


@pytest.mark.parametrize("name", [name for name in BY_HAND if name != "ce"])
def test_zero_exactly_where_the_distributions_are_one(name: str) -> None:
    """A loss whose minimum lies elsewhere. Unnormalised logits must not matter."""
    assert float(LOSSES[name](P, P.log() + 7.0)) == pytest.approx(0.0, abs=1e-5)
    assert float(LOSSES[name](P, Q.log())) > 0.01


@pytest.mark.parametrize("name", BY_HAND)
def test_finite_where_the_target_is_certain(name: str) -> None:
    """0 * log 0: greedy-like distributions must give numbers and gradients."""
    logits = torch.zeros(3, requires_grad=True)
    value = LOSSES[name](torch.tensor([1.0, 0.0, 0.0]), logits)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0] < 0  # more of the certain token lowers the loss


def test_acceptance_is_one_minus_tv_and_what_sampling_gives() -> None:
    """sum min(p, q) against drawing from q and accepting with min(1, p / q): 4 sigma of 200 000
    draws is below 0.005."""
    assert float(acceptance(P, Q.log())) == pytest.approx(0.7)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(Q, 200_000, replacement=True, generator=generator)
    accepted = torch.rand(len(drawn), generator=generator) < (P / Q)[drawn]
    assert float(accepted.float().mean()) == pytest.approx(0.7, abs=0.005)


def test_sums_and_their_errors() -> None:
    """0.1*ce+0.9*tv is DSpark's; a misspelt name gets the nearest."""
    assert float(parse_loss("0.1*ce+0.9*tv")(P, Q.log())) == pytest.approx(
        0.1 * BY_HAND["ce"] + 0.9 * 0.3
    )
    assert parse_loss("reverse-kl") is LOSSES["reverse_kl"]
    for text, message in {
        "reverse_lk": "Did you mean 'reverse_kl'",
        "x*kl": "is no number",
        "-1*kl": "positive",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_loss(text)


def test_reduced_vocabulary() -> None:
    """Renormalised over the ids; a position whose likeliest token is outside does not count;
    acceptance is against the whole."""
    known = [torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), torch.tensor([0.7, 0.1, 0.1, 0.1]).log()]
    logits = torch.stack([known[0], torch.full((4,), float("nan")), known[1]])[None]
    ids = torch.tensor([1, 3])
    mask = torch.tensor([[True, False, True]])
    for size in (1, 5):
        targets = target_distributions(logits + 5.0, mask, ids, size, share=True)
        torch.testing.assert_close(targets.probs[0], torch.tensor([1 / 3, 2 / 3]))
        torch.testing.assert_close(targets.whole[0], torch.tensor([0.2, 0.4]))
        assert targets.counts.tolist() == [1, 0]
        assert acceptance(targets.whole, targets.probs.log()).tolist() == pytest.approx([0.6, 0.2])
        everything = target_distributions(logits, mask, None, size, share=True)
        torch.testing.assert_close(everything.whole, softmax_fp32(logits[mask]))
        assert everything.counts.tolist() == [1, 1]
        assert target_distributions(logits, mask, ids, size, share=False).share is None


def test_weighted_mean_ignores_what_does_not_count() -> None:
    """NaN in padding must not reach the loss."""
    values = torch.tensor([1.0, float("nan"), 3.0])
    assert float(weighted_mean(values, torch.tensor([True, False, True]))) == 2.0
    assert float(weighted_mean(values, torch.zeros(3))) == 0.0


def test_smooth_l1_is_the_mean_over_features() -> None:
    """Half a square below 1, linear above."""
    assert float(smooth_l1(torch.zeros(2), torch.tensor([0.5, 3.0]))) == pytest.approx(
        (0.125 + 2.5) / 2
    )


def test_distributions_are_fp32() -> None:
    """bfloat16 logits of a large vocabulary would sum to anything."""
    assert softmax_fp32(torch.zeros(5, dtype=torch.bfloat16)).dtype == torch.float32
