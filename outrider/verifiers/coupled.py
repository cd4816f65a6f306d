"""Drafter-invariant verification ("gumbel"): the target's own noisy choice decides, the draft only
guesses it.

Same seed, same text, with any drafter, any length, any batch, or no speculation. The price is
acceptance: P(draft = target's choice) instead of sum min(p, q); a drafter that uses the same noise
recovers most of it.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from outrider.sampling.rng import Randomness, gumbel_choice
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier, check
from outrider.verifiers.greedy import greedy_verdict


class CoupledVerifier(Verifier):
    name: ClassVar[str] = "gumbel"
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = True

    shape: ClassVar[str] = "tree"

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        check(self, draft, target_probs)
        noise = rng.gumbel(positions[:, None] + draft.depths(), target_probs.shape[2])
        choice = gumbel_choice(target_probs, noise).tolist()  # (B, N+1); sync: once
        return greedy_verdict(draft, choice)
