"""The verdict on greedy rows, without distributions: the fast path alongside the verifiers.

Where every distribution of the target is a point mass, all lossless verifiers decide alike, however
the draft was drawn. A draft token is kept exactly when it is the target's choice, and the token
after the kept prefix is the target's choice there. So no vocabulary-wide tensor is needed.
`tests/unit/verifiers/test_greedy.py` compares it with the verifiers on the same point masses.
"""

from __future__ import annotations

from outrider.types import Draft, Verdict
from outrider.verifiers.base import agreeing_ends, path_verdict, prefix_verdict


def greedy_verdict(draft: Draft, choice: list[list[int]]) -> Verdict:
    """The kept path and the next token, from the target's choices (B, N+1): its favourites, or the
    winners of its races."""
    if draft.parents is None:
        return _chain_verdict(draft, choice)
    ends = agreeing_ends(draft, choice)
    return path_verdict(draft, ends, [row[end + 1] for row, end in zip(choice, ends, strict=True)])


def _chain_verdict(draft: Draft, choice: list[list[int]]) -> Verdict:
    """The verdict on a chain, without the children of every node: steps of one row are short."""
    counts = [_agreed(*row) for row in zip(*draft.lists, choice, strict=True)]
    return prefix_verdict(
        draft, counts, [row[count] for row, count in zip(choice, counts, strict=True)]
    )


def _agreed(tokens: list[int], length: int, choice: list[int]) -> int:
    return next((node for node in range(length) if tokens[node] != choice[node]), length)
