"""The verdict on greedy rows, without laws: the fast path beside the verifiers.

Where every law of the target is a point mass, every lossless verifier decides the same, whatever the draft was drawn from:
a draft token is kept with probability 0 or 1, namely when it is the target's choice, and the token after the kept prefix is
the target's choice there. So no vocabulary-wide tensor is needed. `tests/unit/verifiers/test_greedy.py` holds this to the
verifiers on the same point masses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.types import Draft, Verdict


def greedy_verdict(draft: Draft, choice: Tensor) -> Verdict:
    """The kept prefix of a chain and the next token, from the target's choices (B, N+1) int64."""
    chosen, drafted, lengths = choice.tolist(), draft.tokens.tolist(), draft.lengths.tolist()  # sync: once
    counts = [_agreement(*row) for row in zip(chosen, drafted, lengths, strict=True)]
    num_nodes = draft.num_nodes
    lines = [
        [*range(count), *[-1] * (num_nodes - count), count, row[count], count == length]
        for row, count, length in zip(chosen, counts, lengths, strict=True)
    ]
    packed = torch.tensor(lines, dtype=torch.int64, device=choice.device)  # one tensor: each costs as much as all
    return Verdict(packed[:, :num_nodes], packed[:, -3], packed[:, -2], packed[:, -1].bool())


def _agreement(chosen: list[int], drafted: list[int], length: int) -> int:
    """How many draft tokens are the target's own."""
    return next((node for node in range(length) if drafted[node] != chosen[node]), length)
