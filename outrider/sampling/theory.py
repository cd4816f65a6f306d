"""The closed forms of speculative decoding: tokens per step, and the speedup.

Leviathan et al. 2211.17192: Theorem 3.5 (alpha), Equation 1 (tau), Theorem 3.8 (speedup). alpha is
the probability that a tested draft token is accepted, equal at all positions; k the draft tokens
per step; c the time of a draft token / that of a target pass over one token. Acceptance by position
and measured costs: `outrider/lab/predict.py`.
"""

from __future__ import annotations

from outrider.errors import ConfigError


def tau(alpha: float, k: int) -> float:
    """Mean tokens emitted per target pass, (1 - alpha^(k+1)) / (1 - alpha), the target's own
    included. Equation 1."""
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha must be between 0 and 1, got {alpha}")
    if k < 0:
        raise ConfigError(f"k must be at least 0, got {k}")
    # the same sum, without 0/0 at alpha = 1
    return sum(alpha**accepted for accepted in range(k + 1))


def speedup(tokens: float, k: int, c: float, wide_pass: float = 1.0) -> float:
    """Gain over plain decoding of steps that emit `tokens` each: tokens / (v(k + 1) + k c). Theorem
    3.8.

    `wide_pass`: v(k + 1), a target pass over k + 1 tokens / one over a single token.
    """
    if not c >= 0:
        raise ConfigError(f"c (draft token / target pass) must be at least 0, got {c}")
    return tokens / (wide_pass + k * c)
