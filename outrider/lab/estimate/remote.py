"""What a draft service would bring, by the length of the line to it; docs/algorithms/remote-drafts.md has the formulas."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import ConfigError
from outrider.lab.estimate.curves import StepCosts
from outrider.lab.estimate.estimate_result import EstimateInput, RemoteEstimate, RemoteLength
from outrider.lab.estimate.inputs import Costs
from outrider.sampling.theory import tau_of

HIT_RATE = 0.5  # where nobody knows: about what alternatives behind a chain catch


def remote_of(asked: EstimateInput, survival: Sequence[float], costs: Costs, length: int) -> RemoteEstimate | None:
    """None where no draft service is asked about. Raises ConfigError for values out of range, and for costs that do not tell
    drafting from the target's pass in seconds."""
    if asked.remote_rtt_s is None:
        if asked.hit_rate is not None:
            raise ConfigError("--set hit_rate is about a draft service: add --remote-rtt-ms, or leave it out")
        return None
    _check(asked, costs)
    return remote_estimate(asked.remote_rtt_s, asked.hit_rate, survival, costs.steps, length)


def remote_estimate(
    rtt_s: float, hit_rate: float | None, survival: Sequence[float], costs: StepCosts, length: int
) -> RemoteEstimate:
    """The formulas for lengths up to `length`; the best one is the fastest of those whose reply the drafter waits for.

    `hit_rate`: None for the usual one. `costs` in seconds, with drafting apart from the target's pass.
    """
    rate, plain_s = HIT_RATE if hit_rate is None else hit_rate, costs.step_s(0)[0]
    lengths = [_at(gamma, survival, costs, rtt_s, rate) for gamma in range(1, length + 1)]
    in_time = [one for one in lengths if one.reply_s <= plain_s]
    best = max(in_time or lengths, key=lambda one: (one.overlapped_speedup, -one.num_draft_tokens))
    return RemoteEstimate(
        rtt_s=rtt_s,
        hit_rate=rate,
        hit_rate_given=hit_rate is not None,
        lengths=lengths,
        best_num_draft_tokens=best.num_draft_tokens,
        synchronous_speedup=max(one.synchronous_speedup for one in in_time or lengths),
        overlapped_speedup=best.overlapped_speedup,
        pays=best.overlapped_speedup > 1,
        in_time=bool(in_time),
        break_even_hit_rate=break_even_hit_rate(best, costs),
        co_located_speedup=max(one.co_located_speedup for one in lengths),
    )


def break_even_hit_rate(at: RemoteLength, costs: StepCosts) -> float | None:
    """The hit rate from which overlapped drafting is no slower than plain decoding; None where none is enough."""
    worst, best = at.target_s + at.reply_s, max(at.target_s, at.reply_s)
    allowed = at.tau * costs.step_s(0)[0]
    if allowed < best:
        return None
    return 0.0 if allowed >= worst else (worst - allowed) / (worst - best)


def _at(gamma: int, survival: Sequence[float], costs: StepCosts, rtt_s: float, hit_rate: float) -> RemoteLength:
    plain_s, drafting_s = costs.step_s(0)[0], costs.draft_fixed_s + gamma * costs.draft_s_per_token
    target_s, reply_s, tau = costs.step_s(gamma)[0] - drafting_s, rtt_s + drafting_s, tau_of(survival[:gamma])
    overlapped_s = hit_rate * max(target_s, reply_s) + (1 - hit_rate) * (target_s + reply_s)
    return RemoteLength(
        num_draft_tokens=gamma, tau=tau, target_s=target_s, reply_s=reply_s,
        synchronous_speedup=tau * plain_s / (target_s + reply_s), overlapped_speedup=tau * plain_s / overlapped_s,
        co_located_speedup=tau * plain_s / (target_s + drafting_s),
    )  # fmt: skip


def check_line(rtt_s: float, hit_rate: float | None) -> None:
    """Raises ConfigError for values out of range."""
    if not 0 <= rtt_s < float("inf"):
        raise ConfigError(f"--remote-rtt-ms must be at least 0, got {1e3 * rtt_s:g}")
    if hit_rate is not None and not 0 <= hit_rate <= 1:
        raise ConfigError(f"--set hit_rate must be between 0 and 1, got {hit_rate}")


def _check(asked: EstimateInput, costs: Costs) -> None:
    if asked.remote_rtt_s is not None:
        check_line(asked.remote_rtt_s, asked.hit_rate)
    if not costs.is_timed:
        raise ConfigError(
            "--remote-rtt-ms needs to know how many milliseconds a target pass takes: add --target-ms, or sizes with --bandwidth"
        )
    if costs.steps.whole_steps:
        raise ConfigError("--remote-rtt-ms needs drafting apart from the target's pass, and these are times of whole steps")
