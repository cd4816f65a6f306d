"""What a draft service would bring, by the length of the line to it; docs/algorithms/remote-drafts.md has the formulas."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import ConfigError
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.estimate.estimate_result import RemoteEstimate, RemoteLength


def remote_estimate(rtt_s: float, survival: Sequence[float], costs: StepCosts, length: int) -> RemoteEstimate:
    """The formulas for lengths up to `length`; the best one is the fastest of those whose reply the drafter waits for.

    `costs` in seconds, with drafting apart from the target's pass.
    """
    plain_s = costs.step_s(0)[0]
    lengths = [_at(gamma, survival, costs, rtt_s) for gamma in range(1, length + 1)]
    in_time = [one for one in lengths if one.reply_s <= plain_s]
    best = max(in_time or lengths, key=lambda one: (one.speedup, -one.num_draft_tokens))
    return RemoteEstimate(
        rtt_s=rtt_s,
        lengths=lengths,
        best_num_draft_tokens=best.num_draft_tokens,
        speedup=best.speedup,
        pays=best.speedup > 1,
        in_time=bool(in_time),
        co_located_speedup=max(one.co_located_speedup for one in lengths),
    )


def _at(gamma: int, survival: Sequence[float], costs: StepCosts, rtt_s: float) -> RemoteLength:
    plain_s, drafting_s = costs.step_s(0)[0], costs.draft_fixed_s + gamma * costs.draft_s_per_token
    target_s, reply_s, tau = costs.step_s(gamma)[0] - drafting_s, rtt_s + drafting_s, 1 + sum(survival[:gamma])
    return RemoteLength(
        num_draft_tokens=gamma, tau=tau, target_s=target_s, reply_s=reply_s,
        speedup=tau * plain_s / (target_s + reply_s), co_located_speedup=tau * plain_s / (target_s + drafting_s),
    )  # fmt: skip


def check_line(rtt_s: float) -> None:
    """Raises ConfigError for a round trip that cannot be."""
    if not 0 <= rtt_s < float("inf"):
        raise ConfigError(f"--remote-rtt-ms must be at least 0, got {1e3 * rtt_s:g}")
