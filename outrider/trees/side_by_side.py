"""Drafts of several drafters put side by side into one: row by row, whole, never merged within a
row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.types import Draft


def side_by_side(drafts: Sequence[Draft], owners: Sequence[int]) -> Draft:
    """One draft whose row b is row b of drafts[owners[b]]. At most as wide as its widest row."""
    lengths = torch.stack([drafts[owner].lengths[row] for row, owner in enumerate(owners)])
    width = int(lengths.max())
    used = sorted({owner for row, owner in enumerate(owners) if lengths[row]})
    if not width or len(used) == 1:
        return (
            replace(drafts[used[0]], lengths=lengths)
            if used
            else Draft.empty(len(owners), lengths.device)
        )
    fits = [_of_width(draft, width) for draft in drafts]
    choose = torch.tensor(owners, device=lengths.device)
    rows = torch.arange(len(owners), device=lengths.device)
    some_probs = next((draft.probs for draft in fits if draft.probs is not None), None)
    return Draft(
        tokens=torch.stack([draft.tokens for draft in fits])[choose, rows],
        lengths=lengths,
        parents=torch.stack([draft.parent_nodes() for draft in fits])[choose, rows]
        if _has_tree(drafts)
        else None,
        probs=None
        if some_probs is None
        else torch.stack([_probs(draft, some_probs) for draft in fits])[choose, rows],
        sampled=None
        if some_probs is None
        else torch.stack([draft.is_sampled() for draft in fits])[choose, rows],
        # one of them draws siblings at most, the others chains
        replacement=any(drafts[owner].replacement for owner in used),
        budgets=[
            None if (known := drafts[owner].budgets) is None else known[row]
            for row, owner in enumerate(owners)
        ],
        parts=[
            None if (parts := drafts[owner].parts) is None else parts[row]
            for row, owner in enumerate(owners)
        ],
    )


def _has_tree(drafts: Sequence[Draft]) -> bool:
    return any(draft.parents is not None for draft in drafts)


def _of_width(draft: Draft, width: int) -> Draft:
    """Padded or cut to `width` nodes (what is cut belongs to rows of another drafter)."""
    more = width - draft.num_nodes
    return Draft(
        tokens=F.pad(draft.tokens, (0, more)),
        lengths=draft.lengths,
        parents=F.pad(draft.parent_nodes(), (0, more), value=-1)
        if draft.parents is not None
        else None,
        probs=None if draft.probs is None else F.pad(draft.probs, (0, 0, 0, more)),
        sampled=F.pad(draft.is_sampled(), (0, more)),
    )


def _probs(draft: Draft, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if draft.probs is None else draft.probs
