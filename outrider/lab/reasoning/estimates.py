"""What each draft length should bring, by three estimates that know more and more, before any of these lengths has run.

    alpha       one number: accepted / tested of the recording, all positions alike, and c, the price of a draft token
    survival    how far the recorded drafts were kept, and what a step of each length costs
    replay      where they were kept: every length walks over the recorded texts, and the same costs

The recording's drafts are longer than most that are asked about, and begin where long drafts end: right after a rejection more
often than short ones do. So its survival is not that of shorter drafts; the walk (`explain/forecast.py`) begins its steps where
a draft of that length would, and ends them where the text ends. It is exact for greedy decoding, an expectation over draws else.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.lab.estimate.curves import StepCosts, extended
from outrider.lab.explain.forecast import TextWalk
from outrider.lab.reasoning.result import LengthEstimate
from outrider.sampling.theory import predicted_speedup, tau, tau_of


def estimate_lengths(
    alpha: float, c: float, survival: Sequence[float], walks: Sequence[TextWalk], costs: StepCosts, longest: int
) -> list[LengthEstimate]:
    """γ = 0 .. longest."""
    found = []
    for gamma in range(longest + 1):
        relative = costs.relative(gamma)
        from_survival, (replayed, behind_first) = tau_of(extended(survival, gamma)), replayed_tau(walks, gamma)
        found.append(
            LengthEstimate(
                num_draft_tokens=gamma, step_s=costs.step_s(gamma)[0],
                alpha_tau=tau(alpha, gamma), alpha_speedup=predicted_speedup(alpha, gamma, c),
                survival_tau=from_survival, survival_speedup=from_survival / relative,
                replay_tau=replayed, replay_speedup=behind_first / relative,
            )
        )  # fmt: skip
    return found


def best_of(estimates: Sequence[LengthEstimate], least: int = 0) -> int:
    """The length from `least` on with the highest replayed speedup; ties: fewer tokens."""
    return max(estimates[least:], key=lambda one: (one.replay_speedup, -one.num_draft_tokens)).num_draft_tokens


def replayed_tau(walks: Sequence[TextWalk], gamma: int) -> tuple[float, float]:
    """Tokens per step: of all steps, and of those behind each text's first one, which is where speeds are measured."""
    tokens = steps = first = 0.0
    for walk in walks:
        asked = max(0, min(gamma, walk.limit - 1))
        first += min(len(walk), 1 + sum(walk.survival(0, asked)))
        tokens += len(walk)
        steps += walk.steps(gamma)
    later = steps - len(walks)
    return tokens / steps if steps else 1.0, (tokens - first) / later if later > 0 else 1.0
