"""The verdict on greedy rows, without laws: the fast path beside the verifiers.

Where every law of the target is a point mass, every lossless verifier decides the same, whatever the draft was drawn from:
a draft token is kept with probability 0 or 1, namely when it is the target's choice, and the token after the kept prefix is
the target's choice there. So no vocabulary-wide tensor is needed. `tests/unit/verifiers/test_greedy.py` holds this to the
verifiers on the same point masses.
"""

from __future__ import annotations

from torch import Tensor

from outrider.types import Draft, Verdict
from outrider.verifiers.base import agreeing_ends, path_verdict


def greedy_verdict(draft: Draft, choice: Tensor) -> Verdict:
    """The kept path and the next token, from the target's choices (B, N+1) int64."""
    chosen = choice.tolist()  # sync: once
    ends = agreeing_ends(draft, chosen)
    return path_verdict(draft, ends, [row[end + 1] for row, end in zip(chosen, ends, strict=True)])
