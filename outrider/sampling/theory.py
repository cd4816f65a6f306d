"""What speculation can bring: closed forms, each with its source. Valid for i.i.d. acceptance and a flat
verify cost.

alpha = probability that a tested draft token is accepted (per position: sum_v min(p, q)); gamma = draft
tokens per step; c = drafter time per token / target pass time. tau counts emitted tokens per target pass,
the bonus token included. Leviathan et al. 2211.17192: Definition 3.1, Theorem 3.5 (alpha), Equation 1
(tau), Theorem 3.8 (speedup), Corollary 3.9.

Acceptance that differs by position is a survival curve, S(i) = P(at least i draft tokens are kept), i = 1, 2, ...:
everything above holds with alpha^i replaced by S(i). Costs that are not flat: `outrider/lab/estimate/curves.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import ConfigError


def tau(alpha: float, gamma: int) -> float:
    """Mean tokens emitted per target pass, (1 - alpha^(gamma+1)) / (1 - alpha). Equation 1."""
    _check(alpha, gamma)
    return sum(alpha**accepted for accepted in range(gamma + 1))  # the same sum, without 0/0 at alpha = 1


def predicted_speedup(alpha: float, gamma: int, c: float) -> float:
    """Wall-clock gain over gamma = 0, tau / (gamma c + 1). Theorem 3.8."""
    _check_cost(c)
    return tau(alpha, gamma) / (gamma * c + 1)


def speedup(tokens: float, k: int, c: float, wide_pass: float = 1.0) -> float:
    """Gain over plain decoding of steps that emit `tokens` each: tokens / (v(k + 1) + k c). Theorem 3.8.

    `wide_pass`: v(k + 1), a target pass over k + 1 tokens / one over a single token.
    """
    _check_cost(c)
    return tokens / (wide_pass + k * c)


def break_even_alpha(gamma: int, c: float) -> float | None:
    """The alpha from which speculating with `gamma` pays (speedup 1); None when no alpha does (c > 1).

    Solves alpha + alpha^2 + ... + alpha^gamma = gamma c. gamma = 1 gives alpha = c (Corollary 3.9: alpha > c
    is enough to gain, with gamma = 1).
    """
    _check_cost(c)
    return alpha_of_tau(gamma * c + 1, gamma)


def alpha_of_tau(tokens: float, gamma: int) -> float | None:
    """The inverse of `tau`: the alpha with which steps of `gamma` draft tokens emit `tokens` each, found by bisection.

    None where no alpha emits as many (`tokens` > gamma + 1), and for gamma = 0, where alpha means nothing.
    """
    _check(0.0, gamma)
    if gamma == 0 or tokens > gamma + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if tau(middle, gamma) >= tokens else (middle, high)
    return high


def survival_of(acceptance: Sequence[float], length: int) -> list[float]:
    """S(1) .. S(length) = c_1, c_1 c_2, ... from conditional acceptances c_i = P(i kept | i - 1 kept). Positions beyond the
    last one given accept like the last one; a single alpha is a list of one.
    """
    if not acceptance:
        raise ConfigError("no acceptance given: one probability per position is needed, or one for all")
    for value in acceptance:
        _check(value, length)
    survival, curve = 1.0, []
    for position in range(length):
        survival *= acceptance[min(position, len(acceptance) - 1)]
        curve.append(survival)
    return curve


def tau_of(survival: Sequence[float]) -> float:
    """`tau` of a chain with S(1) .. S(gamma): 1 + S(1) + ... + S(gamma)."""
    return 1 + sum(survival)


def alpha_of(survival: Sequence[float]) -> float:
    """accepted / tested of a chain with S(1) .. S(gamma), gamma >= 1: the one alpha that counters show.

    Token i is tested when i - 1 were kept: tested = 1 + S(1) + ... + S(gamma - 1).
    """
    return sum(survival) / tau_of(survival[:-1])


def envelope_speedup(effective_gamma: float, gamma: int, c: float) -> float:
    """The back of the envelope: gamma T / (gamma t + T) with the effective gamma above the line, c = t / T.

    gamma draft tokens replace gamma target passes, so gamma T seconds become gamma t + T. Not all are kept: above
    the line stands `effective_gamma`, the mean number of *kept draft tokens* per step, tau - 1; below it gamma, because
    rejected tokens are paid for. The token that the target adds is forgotten: the result is Leviathan's, less 1 / (gamma c + 1).
    gamma = 0 is plain decoding, 1.
    """
    _check(0.0, gamma)
    _check_cost(c)
    if not 0 <= effective_gamma <= gamma:
        raise ConfigError(f"the effective gamma must be between 0 and gamma = {gamma}, got {effective_gamma}")
    return effective_gamma / (gamma * c + 1) if gamma else 1.0


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha must be between 0 and 1, got {alpha}")
    if gamma < 0:
        raise ConfigError(f"gamma must be at least 0, got {gamma}")


def _check_cost(c: float) -> None:
    if not c >= 0:
        raise ConfigError(f"c (draft pass / target pass) must be at least 0, got {c}")
