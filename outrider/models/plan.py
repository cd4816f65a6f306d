"""The plan of one pass over a cache: where its tokens are written, what each of them may see, and their position ids."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kv import KVCache
from outrider.kv.cache import BLOCK
from outrider.models.attention import PassPlan
from outrider.models.layout import attention_mask, tree_depths_and_ancestors


def plan_pass(
    kv: KVCache, num_rows: int, width: int, parents: Tensor | None = None, first_row: int = 0,
    *, window: int | None = None, last_position: int, native: bool = False,
) -> tuple[PassPlan, Tensor]:  # fmt: skip
    """Of `width` tokens each, written behind what rows first_row .. first_row + num_rows hold; and position ids (B, T).

    `parents` (B, T-1) as in `Draft`, None for a chain. The cache must have room for them (`KVCache.reserve`).
    """
    lengths = kv.lengths[first_row : first_row + num_rows]
    num_keys = min(-(-(max(lengths) + width) // BLOCK) * BLOCK, kv.capacity)
    starts = torch.tensor(lengths, device=kv.device)
    offsets = torch.arange(width, device=kv.device)
    depths, sees = (None, None) if parents is None else tree_depths_and_ancestors(parents)
    # Padding tokens may stand behind the last position the model knows; what they compute is never read.
    positions = (starts[:, None] + (offsets if depths is None else depths)).clamp(max=last_position)
    slots = torch.arange(num_rows, device=kv.device) * kv.capacity
    full = attention_mask(starts, width, num_keys, kv.dtype, None, depths, sees)
    near = None if window is None else attention_mask(starts, width, num_keys, kv.dtype, window, depths, sees)
    plan = PassPlan(
        keys=[store[first_row:] for store in kv.keys] if first_row else kv.keys,
        values=[store[first_row:] for store in kv.values] if first_row else kv.values,
        places=((slots + starts)[:, None] + offsets).flatten(),
        mask=full,
        window_mask=near,
        native=native,
    )
    return plan, positions
