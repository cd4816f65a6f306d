"""Losses by name: how far a draft's distribution q is from the target's p at a position. 0 means q
= p (for `ce`: p's entropy).

    name         value at a position                          source
    kl           sum p log(p / q)                             distillation (Hinton et al. 1503.02531; DistillSpec 2310.08461)
    reverse_kl   sum q log(q / p)                             DistillSpec
    jsd          (KL(p||m) + KL(q||m)) / 2, m = (p + q) / 2   DistillSpec
    tv           1 - sum min(p, q) = ||p - q||_1 / 2          one minus the acceptance itself (Leviathan et al. 2211.17192)
    ce           - sum p log q                                EAGLE-3 (2503.01840): the gradient of kl
    nla          - log sum min(p, q)                          LK losses, as in speculators' eager.py
    lk_hybrid    w kl + (1 - w) tv, w = exp(-3 alpha)         LK losses: kl where they are far apart, tv where they are near;
                                                              alpha = sum min(p, q) of the position,
                                                              no gradient through w

A sum is written as `0.1*ce+0.9*tv` (`parse_loss`). `smooth_l1` compares features, not distributions
(EAGLE-1, 2401.15077).

All take (p as probabilities (..., V), draft logits (..., V)), compute in fp32 and return (...,):
the caller weighs positions with `weighted_mean`. Target distributions are at temperature 1 unless
the caller scaled the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ConfigError, did_you_mean

# (target distribution (..., V), draft logits (..., V)) -> (...,)
Loss = Callable[[Tensor, Tensor], Tensor]
# below fp32's resolution of a probability: keeps logarithms finite where p or the overlap is 0
TINY = 1e-12
HYBRID_RATE = 3.0  # of lk_hybrid


def softmax_fp32(logits: Tensor) -> Tensor:
    """(..., V) fp32: the distribution that logits stand for."""
    return logits.float().softmax(dim=-1)


def kl(target_probs: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q)."""
    return ce(target_probs, logits) - _entropy(target_probs)


def reverse_kl(target_probs: Tensor, logits: Tensor) -> Tensor:
    """KL(q || p). Where p = 0 its logarithm is that of TINY: finite, and steep."""
    log_q = logits.float().log_softmax(dim=-1)
    return (log_q.exp() * (log_q - _log(target_probs))).sum(dim=-1)


def jsd(target_probs: Tensor, logits: Tensor) -> Tensor:
    """Jensen-Shannon divergence, at most log 2."""
    target_probs = target_probs.float()
    log_q = logits.float().log_softmax(dim=-1)
    q = log_q.exp()
    log_m = _log((target_probs + q) / 2)
    return (
        (target_probs * (_log(target_probs) - log_m)).sum(dim=-1)
        + (q * (log_q - log_m)).sum(dim=-1)
    ) / 2


def tv(target_probs: Tensor, logits: Tensor) -> Tensor:
    """Total variation distance: the probability that a draft token is rejected."""
    return (target_probs.float() - softmax_fp32(logits)).abs().sum(dim=-1) / 2


def ce(target_probs: Tensor, logits: Tensor) -> Tensor:
    """Cross entropy of the full distribution."""
    return -(target_probs.float() * logits.float().log_softmax(dim=-1)).sum(dim=-1)


def nla(target_probs: Tensor, logits: Tensor) -> Tensor:
    """Negative log acceptance."""
    return -_log(acceptance(target_probs, logits))


def lk_hybrid(target_probs: Tensor, logits: Tensor) -> Tensor:
    """KL far from the target, TV near it."""
    target_probs = target_probs.float()
    log_q = logits.float().log_softmax(dim=-1)
    far = (target_probs - log_q.exp()).abs().sum(dim=-1) / 2  # 1 - alpha
    share = torch.exp(-HYBRID_RATE * (1 - far.detach()))
    return (
        share * (-(target_probs * log_q).sum(dim=-1) - _entropy(target_probs)) + (1 - share) * far
    )


def smooth_l1(target: Tensor, features: Tensor) -> Tensor:
    """The smooth L1 loss of features (..., H): the mean over H, knee at 1."""
    return F.smooth_l1_loss(features.float(), target.float(), reduction="none").mean(dim=-1)


def acceptance(target_probs: Tensor, logits: Tensor) -> Tensor:
    """(...,): sum_x min(p, q), the probability that a token drawn from q is accepted (Leviathan et
    al., theorem 3.5)."""
    return torch.minimum(target_probs.float(), softmax_fp32(logits)).sum(dim=-1)


LOSSES: dict[str, Loss] = {
    "kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv, "ce": ce, "nla": nla, "lk_hybrid": lk_hybrid, "hybrid": lk_hybrid,
}  # fmt: skip


def parse_loss(text: str) -> Loss:
    """A loss by name, or a weighted sum like `0.1*ce+0.9*tv`. Raises ConfigError with the nearest
    name."""
    terms = [_term(word.strip(), text) for word in text.split("+")]

    def total(target_probs: Tensor, logits: Tensor) -> Tensor:
        values = [weight * term(target_probs, logits) for weight, term in terms]
        return torch.stack(values).sum(dim=0)

    return terms[0][1] if len(terms) == 1 and terms[0][0] == 1 else total


def _term(word: str, text: str) -> tuple[float, Loss]:
    factor, star, name = word.rpartition("*")
    name = name.strip().replace("-", "_")
    if name not in LOSSES:
        raise ConfigError(f"loss '{text}': unknown loss '{name}'.{did_you_mean(name, LOSSES)}")
    try:
        weight = float(factor) if star else 1.0
    except ValueError as error:
        raise ConfigError(
            f"loss '{text}': '{factor}' is no number; a sum is written like 0.1*ce+0.9*tv"
        ) from error
    if not 0 < weight < float("inf"):
        raise ConfigError(f"loss '{text}': a weight must be positive, got {factor}")
    return weight, LOSSES[name]


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Scalar: sum(values * weights) / sum(weights), 0 where nothing counts. `weights` may be a bool
    mask.

    Values that do not count may be anything, NaN included.
    """
    weights = weights.to(values.dtype)
    finite = torch.where(weights > 0, values, torch.zeros_like(values))
    return (finite * weights).sum() / weights.sum().clamp(min=TINY)


@dataclass(frozen=True)
class TargetDistributions:
    """The target's distributions at N positions, over the draft's vocabulary."""

    probs: Tensor  # (N, Vd) fp32, renormalised: what a draft can learn
    counts: Tensor  # (N,) fp32: 1 where the target's likeliest token is among them, else 0
    # (N,) fp32: how much of the whole distribution is about these tokens; None: nobody asked
    share: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """(N, Vd): the target's own probabilities; `acceptance` of them is what serving will see."""
        assert self.share is not None
        return self.probs * self.share[:, None]

    def at(self, which: Tensor) -> TargetDistributions:
        """The distributions of some positions."""
        return TargetDistributions(
            self.probs[which], self.counts[which], None if self.share is None else self.share[which]
        )


def target_distributions(
    logits: Tensor, mask: Tensor, ids: Tensor | None, size: int, *, share: bool
) -> TargetDistributions:
    """The target's distributions over the draft vocabulary at positions that count, `size` of them
    at a time.

    `logits`: (B, T, V). `mask`: (B, T) bool, the positions. `ids`: (Vd,) the draft vocabulary;
    None: all tokens. `share`: whether the share of the whole distribution is wanted, which costs a
    sum over V.

    A position does not count where the target's likeliest token is outside: the restricted
    distribution is then about tokens that the target would not emit there, and no draft can be
    right. When acceptance is measured, such a position still counts as a rejection.
    """
    flat = logits.flatten(0, 1)
    positions = mask.flatten().nonzero()[:, 0]
    width = logits.shape[-1] if ids is None else len(ids)
    target_probs = torch.empty(len(positions), width, device=logits.device)
    counts, shares = (torch.ones(len(positions), device=logits.device) for _ in range(2))
    for begin in range(0, len(positions), size):
        rows = slice(begin, begin + size)
        scored = flat[positions[rows]]
        chosen = (scored if ids is None else scored.index_select(-1, ids)).float()
        target_probs[rows] = chosen.softmax(dim=-1)
        if ids is not None:
            counts[rows] = (chosen.amax(dim=-1) == scored.amax(dim=-1)).float()
            if share:
                shares[rows] = (chosen.logsumexp(dim=-1) - scored.float().logsumexp(dim=-1)).exp()
    return TargetDistributions(target_probs, counts, shares if share else None)


def _log(target_probs: Tensor) -> Tensor:
    return target_probs.float().clamp(min=TINY).log()


def _entropy(target_probs: Tensor) -> Tensor:
    return -(target_probs.float() * _log(target_probs)).sum(dim=-1)
