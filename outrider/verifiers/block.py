"""Block verification (Sun et al. 2403.10444), the default for chains: keep the longest prefix whose
coin shows heads.

Never accepts fewer tokens in expectation than the token-level rule, for the same draft and the same
target pass.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outrider.sampling.block import keep_probs, path_weights
from outrider.sampling.rejection import next_token_weights
from outrider.sampling.rng import Purpose, Randomness
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier, chain_verdict, check
from outrider.verifiers.token import TokenVerifier


class BlockVerifier(Verifier):
    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        check(self, draft, target_probs)
        # nothing sampled: the same distribution, without sums over the vocabulary
        if draft.probs is None:
            return TokenVerifier().verify(draft, target_probs, rng, positions)
        rho = path_weights(target_probs, draft)  # (B, N+1)
        # (B, N)
        heads = rng.bernoulli(keep_probs(target_probs, draft, rho), Purpose.ACCEPT, positions)
        length = torch.arange(1, draft.num_nodes + 1, device=heads.device)
        num_accepted = (
            (heads * length).amax(dim=1) if draft.num_nodes else torch.zeros_like(draft.lengths)
        )
        scale = rho.gather(1, num_accepted[:, None])[:, 0]
        weights = next_token_weights(target_probs, draft, num_accepted, scale)
        return chain_verdict(
            draft, num_accepted, rng.categorical(weights, Purpose.RESAMPLE, positions, 0)
        )
