"""The verdict on greedy rows, without laws: the fast path beside the verifiers.

Where every law of the target is a point mass, every lossless verifier decides the same, whatever the draft was drawn from:
a draft token is kept with probability 0 or 1, namely when it is the target's choice, and the token after the kept prefix is
the target's choice there. So no vocabulary-wide tensor is needed. `tests/unit/verifiers/test_greedy.py` holds this to the
verifiers on the same point masses.
"""

from __future__ import annotations

from torch import Tensor

from outrider.types import Draft, Verdict, VerdictLists


def greedy_verdict(draft: Draft, choice: Tensor) -> Verdict:
    """The kept prefix of a chain and the next token, from the target's choices (B, N+1) int64."""
    chosen, (drafted, lengths) = choice.tolist(), draft.lists  # sync: once
    counts = [_agreement(*row) for row in zip(chosen, drafted, lengths, strict=True)]
    verdict = VerdictLists(
        path=[[*range(count), *[-1] * (draft.num_nodes - count)] for count in counts],
        num_accepted=counts,
        next_token=[row[count] for row, count in zip(chosen, counts, strict=True)],
        all_accepted=[count == length for count, length in zip(counts, lengths, strict=True)],
    )
    return Verdict.of_lists(verdict, draft.num_nodes, choice.device)


def _agreement(chosen: list[int], drafted: list[int], length: int) -> int:
    """How many draft tokens are the target's own."""
    return next((node for node in range(length) if drafted[node] != chosen[node]), length)
