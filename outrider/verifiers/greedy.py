"""The verdict on greedy rows, without laws: the fast path beside the verifiers.

Where every law of the target is a point mass, every lossless verifier decides the same, whatever the draft was drawn from:
a draft token is kept with probability 0 or 1, namely when it is the target's choice, and the token after the kept prefix is
the target's choice there. So no vocabulary-wide tensor is needed. `tests/unit/verifiers/test_greedy.py` holds this to the
verifiers on the same point masses.
"""

from __future__ import annotations

from outrider.types import Draft, Verdict, VerdictLists
from outrider.verifiers.base import agreeing_ends, path_verdict


def greedy_verdict(draft: Draft, choice: list[list[int]]) -> Verdict:
    """The kept path and the next token, from the target's choices (B, N+1)."""
    if draft.parents is None:
        return _chain_verdict(draft, choice)
    ends = agreeing_ends(draft, choice)
    return path_verdict(draft, ends, [row[end + 1] for row, end in zip(choice, ends, strict=True)])


def _chain_verdict(draft: Draft, choice: list[list[int]]) -> Verdict:
    """The same without the children of every node: steps of one row are short."""
    tokens, lengths = draft.lists
    counts = [_agreed(*row) for row in zip(tokens, lengths, choice, strict=True)]
    lists = VerdictLists(
        path=[[*range(count), *[-1] * (draft.num_nodes - count)] for count in counts],
        num_accepted=counts,
        next_token=[row[count] for row, count in zip(choice, counts, strict=True)],
        all_accepted=[count == length for count, length in zip(counts, lengths, strict=True)],
    )
    return Verdict.of_lists(lists, draft.num_nodes, draft.tokens.device)


def _agreed(tokens: list[int], length: int, choice: list[int]) -> int:
    return next((node for node in range(length) if tokens[node] != choice[node]), length)
