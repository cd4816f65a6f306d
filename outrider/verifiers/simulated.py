"""How likely a verifier is to keep one of a node's children, found by having it judge many drafts of one level."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.kept import Children, Probs
from outrider.sampling.rng import KeyedStreams, Randomness
from outrider.types import Draft, Verdict

Verify = Callable[[Draft, Tensor, Randomness, Tensor], Verdict]  # `Verifier.verify`
ROUNDS, ROWS = 16, 32  # drafts that are judged: the share has a standard error of at most 0.022


def simulated_share(verify: Verify, p: Probs, q: Probs | None, children: Children, seed: int) -> float:
    """P(a child is kept), over the children's draws and the verifier's coins."""
    rng = np.random.default_rng(seed)
    kept = 0
    for _ in range(ROUNDS):
        draft = _drafts(q, children, len(p), rng)
        target_probs = torch.from_numpy(p).float().expand(ROWS, draft.num_nodes + 1, -1)
        coins = KeyedStreams(rng.integers(1 << 62, size=ROWS).tolist())
        verdict = verify(draft, target_probs, coins, torch.zeros(ROWS, dtype=torch.int64))
        kept += int((verdict.num_accepted > 0).sum())
    return kept / (ROUNDS * ROWS)


def _drafts(q: Probs | None, children: Children, vocab_size: int, rng: np.random.Generator) -> Draft:
    """ROWS drafts of one node's children, each drawn anew."""
    tokens = np.empty((ROWS, len(children.tokens)), dtype=np.int64)
    left = None if q is None else np.repeat(q[None], ROWS, 0)  # what the next sibling is drawn from
    for rank, (token, is_drawn) in enumerate(zip(children.tokens, children.drawn, strict=True)):
        tokens[:, rank] = token
        if is_drawn:
            assert left is not None, "a drawn child without the distribution it was drawn from"
            ends = left.cumsum(1)
            tokens[:, rank] = (ends > rng.random((ROWS, 1)) * ends[:, -1:]).argmax(1)
        if left is not None and not children.replacement:
            left[np.arange(ROWS), tokens[:, rank]] = 0
    count = len(children.tokens)
    probs = None if q is None else torch.from_numpy(q).float().expand(ROWS, count + 1, vocab_size)
    return Draft(
        torch.from_numpy(tokens), torch.full((ROWS,), count), probs=probs, replacement=children.replacement,
        parents=None if count == 1 else torch.full((ROWS, count), -1),
        sampled=torch.tensor([list(children.drawn)] * ROWS),
    )  # fmt: skip
