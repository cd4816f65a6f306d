"""What speculation can bring: closed forms, each with its source. Valid for i.i.d. acceptance and a flat
verify cost.

alpha = probability that a tested draft token is accepted (per position: sum_v min(p, q)); gamma = draft
tokens per step; c = drafter time per token / target pass time. tau counts emitted tokens per target pass,
the bonus token included. Leviathan et al. 2211.17192: Definition 3.1, Theorem 3.5 (alpha), Equation 1
(tau), Theorem 3.8 (speedup), Corollary 3.9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import ConfigError


def acceptance_rate(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """alpha of one position, sum_v min(p, q) = 1 - TV(p, q): (..., V) x (..., V) -> (...). Theorem 3.5."""
    return torch.minimum(target_probs, draft_probs).sum(dim=-1)


def tau(alpha: float, gamma: int) -> float:
    """Mean tokens emitted per target pass, (1 - alpha^(gamma+1)) / (1 - alpha). Equation 1."""
    _check(alpha, gamma)
    return sum(alpha**accepted for accepted in range(gamma + 1))  # the same sum, without 0/0 at alpha = 1


def predicted_speedup(alpha: float, gamma: int, c: float) -> float:
    """Wall-clock gain over gamma = 0, tau / (gamma c + 1). Theorem 3.8."""
    if c < 0:
        raise ConfigError(f"c (draft pass / target pass) must be at least 0, got {c}")
    return tau(alpha, gamma) / (gamma * c + 1)


def best_gamma(alpha: float, c: float, max_gamma: int = 16) -> int:
    """The number of draft tokens with the largest predicted speedup; 0 = do not speculate. Ties: fewer
    tokens.
    """
    return max(range(max_gamma + 1), key=lambda gamma: (predicted_speedup(alpha, gamma, c), -gamma))


def break_even_alpha(gamma: int, c: float) -> float | None:
    """The alpha from which speculating with `gamma` pays (speedup 1); None when no alpha does (c > 1).

    Solves alpha + alpha^2 + ... + alpha^gamma = gamma c by bisection. gamma = 1 gives alpha = c (Corollary
    3.9: alpha > c is enough to gain, with gamma = 1).
    """
    _check(0.0, gamma)
    if gamma == 0 or predicted_speedup(1.0, gamma, c) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if predicted_speedup(middle, gamma, c) >= 1 else (middle, high)
    return high


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha must be between 0 and 1, got {alpha}")
    if gamma < 0:
        raise ConfigError(f"gamma must be at least 0, got {gamma}")
