"""Drafter-invariant verification ("gumbel"): the target's own noisy choice decides, the draft only guesses
it.

Same seed, same text, with any drafter, any length, any batch, or no speculation. The price is acceptance:
P(draft = target's choice) instead of sum min(p, q); a drafter that uses the same noise recovers most of it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outrider.sampling.coupling import gumbel_choice
from outrider.sampling.rng import Randomness
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier, chain_verdict, check_chain


class CoupledVerifier(Verifier):
    name: ClassVar[str] = "gumbel"
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = True

    def verify(self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor) -> Verdict:
        check_chain(self, draft, target_probs)
        output = torch.arange(draft.num_nodes + 1, device=positions.device)
        noise = rng.gumbel(positions[:, None] + output, target_probs.shape[2])
        choice = gumbel_choice(target_probs, noise)  # (B, N+1)
        agrees = (choice[:, :-1] == draft.tokens) & (output[:-1] < draft.lengths[:, None])
        num_accepted = agrees.long().cumprod(dim=1).sum(dim=1)
        return chain_verdict(draft, num_accepted, choice.gather(1, num_accepted[:, None])[:, 0])
