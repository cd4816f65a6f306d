"""Relaxed acceptance: rules that keep draft tokens which are merely good enough. They CHANGE the
output law.

Deterministic given p, blind to q: a token is kept because the target finds it acceptable, not
because the target would have emitted it. Never a default; a run that uses one is marked lossy in
every result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_typical(
    target_probs: Tensor, tokens: Tensor, parents: Tensor, epsilon: float, delta: float
) -> Tensor:
    """p(x) > min(epsilon, delta exp(-H(p))), H in nats: (B, N) bool. Typical acceptance, Medusa,
    Cai et al. 2401.10774.

    target_probs (B, N+1, V); tokens, parents (B, N). The original's library swaps epsilon and delta
    between functions.
    """
    entropy = torch.special.entr(target_probs).sum(dim=-1)  # (B, N+1)
    threshold = (delta * torch.exp(-entropy)).clamp(max=epsilon).gather(1, parents + 1)
    return _prob(target_probs, tokens, parents) > threshold


def is_among_top(target_probs: Tensor, tokens: Tensor, parents: Tensor, k: int) -> Tensor:
    """x is one of the k likeliest tokens (and not impossible): (B, N) bool. Ties with the k-th
    count as in."""
    kth = (
        target_probs.topk(min(k, target_probs.shape[-1]), dim=-1)
        .values[..., -1]
        .gather(1, parents + 1)
    )
    prob = _prob(target_probs, tokens, parents)
    return (prob >= kth) & (prob > 0)


def _prob(target_probs: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    return target_probs[rows, parents + 1, tokens]
