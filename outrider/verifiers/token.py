"""Token-level rejection sampling (Leviathan et al. 2211.17192): keep tokens up to the first
rejected one.

Simple, the reference of the others, and the cheapest when q is kept for the tested tokens only.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from outrider.sampling.rejection import acceptance, next_token_weights
from outrider.sampling.rng import Purpose, Randomness
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier, chain_verdict, check


class TokenVerifier(Verifier):
    name: ClassVar[str] = "token"
    lossless: ClassVar[bool] = True

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        check(self, draft, target_probs)
        # (B, N)
        accepted = rng.bernoulli(acceptance(target_probs, draft), Purpose.ACCEPT, positions)
        num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
        weights = next_token_weights(target_probs, draft, num_accepted)
        return chain_verdict(
            draft, num_accepted, rng.categorical(weights, Purpose.RESAMPLE, positions, 0)
        )
