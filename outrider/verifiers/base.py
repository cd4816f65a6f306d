"""What every verifier does: from a draft and the target's laws to the kept path and one more token.

A verifier draws only through the `Randomness` it is given, and the shape of its draws depends on shapes
alone, never on values: so the exact-law oracle can replace the randomness by an enumeration of every
outcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.sampling.rng import Randomness
from outrider.types import Draft, Verdict


class Verifier(ABC):
    """The acceptance rule. Stateless: one object serves every batch."""

    name: ClassVar[str]
    lossless: ClassVar[bool]
    coupled: ClassVar[bool] = (
        False  # chooses with keyed noise a drafter may share (drafter-invariant sampling)
    )

    @abstractmethod
    def verify(self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor) -> Verdict:
        """Keep a prefix of the draft and add one token.

        target_probs (B, N+1, V): the law after the pending token and after each node. positions (B,): text
        index of each row's first draft token (= number of committed tokens). Only the first lengths[b]
        nodes of row b count.
        """


def check_chain(verifier: Verifier, draft: Draft, target_probs: Tensor) -> None:
    """Shapes once at entry; a tree is refused by name."""
    if draft.parents is not None:
        raise CapabilityError(f"verifier '{verifier.name}' takes chains, got a tree; use a tree verifier")
    outputs = (draft.num_rows, draft.num_nodes + 1)
    if tuple(target_probs.shape[:2]) != outputs:
        raise ValueError(
            f"target_probs (B, N+1, V) must begin with {outputs}, got {tuple(target_probs.shape)}"
        )
    if draft.probs is not None and draft.probs.shape != target_probs.shape:
        raise ValueError(
            f"draft.probs {tuple(draft.probs.shape)} must equal target_probs {tuple(target_probs.shape)}"
        )


def chain_verdict(draft: Draft, num_accepted: Tensor, next_token: Tensor) -> Verdict:
    """The Verdict of a kept prefix: num_accepted and next_token (B,)."""
    node = torch.arange(draft.num_nodes, device=draft.tokens.device).expand(draft.num_rows, -1)
    return Verdict(
        path=node.masked_fill(node >= num_accepted[:, None], -1),
        num_accepted=num_accepted,
        next_token=next_token,
        all_accepted=num_accepted == draft.lengths,
    )
