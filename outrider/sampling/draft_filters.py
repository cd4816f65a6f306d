"""Top-k, top-p and min-p for drafts: one floor under the scores, from one look at the likeliest
tokens.

A draft's law need not be the target's to the last token, only the one that was drawn from. So
equals at the edge of a nucleus all stay, and a filter that keeps more than the HEAD likeliest
tokens does nothing: no sort, no look from the host, and the same operations in recorded drafting
loops (`models/picking.py`) and out of them (`Warpers.draft_law`). What the target's law is filtered
by is `warpers.py`; a test compares the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEAD = 256  # tokens looked at; constant, so that a row's result never depends on its neighbours


def above_floor(
    scores: Tensor, rows: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Scores (S, M, V) with the unlikely tokens of `rows` (F,) int64 masked.

    top_k (F,) int64, 0 = off; top_p (F,), 1 = off; min_p (F,), 0 = off. Other rows are left alone
    to the last bit.
    """
    options = (
        top_k[:, None, None],
        top_p.to(scores.dtype)[:, None, None],
        min_p.to(scores.dtype)[:, None, None],
    )
    lowest = scores.new_full((*scores.shape[:2], 1), -torch.inf)
    lowest = lowest.index_copy(0, rows, floor(scores.index_select(0, rows), *options))
    return scores.masked_fill(scores < lowest, -torch.inf)


def floor(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, head: int = HEAD) -> Tensor:
    """The lowest score (F, M, 1) that stays, of scores (F, M, V); options (F, 1, 1)."""
    largest = scores.topk(min(head, scores.shape[-1]), dim=-1).values  # (F, M, head), descending
    head = largest.shape[-1]
    kth = largest.gather(-1, (top_k - 1).clamp(0, head - 1).expand(-1, scores.shape[1], -1))
    lowest = kth.masked_fill((top_k <= 0) | (top_k > head), -torch.inf)
    total = scores.masked_fill(scores < lowest, -torch.inf).logsumexp(dim=-1, keepdim=True)
    probs = (largest.masked_fill(largest < lowest, -torch.inf) - total).exp()
    num_kept = (probs.cumsum(dim=-1) - probs < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    edge = largest.gather(-1, num_kept - 1)
    lowest = torch.where((top_p < 1) & (num_kept < head), torch.maximum(lowest, edge), lowest)
    return torch.maximum(lowest, largest[..., :1] + min_p.log())
