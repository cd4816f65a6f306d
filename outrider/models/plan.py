"""The plan of one pass over a cache: where its tokens are written, what each of them may see, and
their position ids."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.kv import KVCache
from outrider.kv.cache import BLOCK
from outrider.models.layout import (
    ancestors_on_host,
    attention_mask,
    chain_mask,
    tree_depths_and_ancestors,
    tree_mask,
)
from outrider.models.pass_plan import PassPlan, ShortSlots


def plan_pass(
    kv: KVCache,
    num_rows: int,
    width: int,
    parents: Tensor | None = None,
    first_row: int = 0,
    *,
    window: int | None = None,
    every_layer: bool = False,
    last_position: int,
) -> tuple[PassPlan, Tensor]:
    """The plan and position ids (B, T) of a pass with `width` tokens a row, after what the cache
    holds.

    Rows are first_row .. first_row + num_rows. `window`: positions that layers with windows see
    back, or all layers where `every_layer` says so.

    `parents` (B, T-1) as in `Draft`, None for a chain. The cache must have room for them
    (`KVCache.reserve`).
    """
    kv.make_room(first_row, num_rows, width)
    lengths = kv.lengths[first_row : first_row + num_rows]
    num_keys = min(-(-(max(lengths) + width) // BLOCK) * BLOCK, kv.capacity)
    if num_rows == 1 and parents is None and window is None and not kv.is_short:
        return _plan_one_chain(kv, width, num_keys, first_row, last_position)
    if parents is not None and window is None and not kv.is_short and kv.device.type == "cpu":
        return _plan_trees(kv, parents, num_keys, first_row, last_position)
    starts = torch.tensor(lengths, device=kv.device)
    texts = torch.tensor(_texts(kv, first_row, num_rows), device=kv.device)
    offsets = torch.arange(width, device=kv.device)
    depths, sees = (None, None) if parents is None else tree_depths_and_ancestors(parents)
    # Padding tokens may stand after the last position the model knows; what they compute is never
    # read.
    positions = (texts[:, None] + (offsets if depths is None else depths)).clamp(max=last_position)
    slots = torch.arange(num_rows, device=kv.device) * kv.capacity

    def mask(starts: Tensor, num_keys: int, within: int | None) -> Tensor:
        return attention_mask(starts, width, num_keys, kv.dtype, within, depths, sees)

    near = None if window is None else partial(mask, starts, num_keys, window)
    short = None
    if kv.is_short:
        own = kv.bases[first_row : first_row + num_rows]
        bases = torch.tensor(own, device=kv.device)
        held = max(length - base for length, base in zip(lengths, own, strict=True))
        num_keys_there = min(-(-(held + width) // BLOCK) * BLOCK, kv.window_capacity)
        near = partial(mask, starts - bases, num_keys_there, window)
        slots_there = torch.arange(num_rows, device=kv.device) * kv.window_capacity
        short = ShortSlots(((slots_there + starts - bases)[:, None] + offsets).flatten(), bases)
    on_host = sees.numpy() if sees is not None and kv.device.type == "cpu" else None
    indices = ((slots + starts)[:, None] + offsets).flatten()
    chain_keys = num_keys if parents is None else None
    whole = partial(mask, starts, num_keys, None)
    if every_layer and near is not None:
        chain_keys = None
        whole = partial(mask, starts, num_keys, window)
        if short is not None and all(shape.window is not None for shape in kv.layers):
            whole, indices = near, short.indices
    stores = _stores(kv, first_row)
    return PassPlan(
        *stores, indices, whole, near, on_host, chain_keys, short=short, starts=lengths
    ), positions


def _plan_one_chain(
    kv: KVCache, width: int, num_keys: int, first_row: int, last_position: int
) -> tuple[PassPlan, Tensor]:
    """The plan of a chain in one row, the pass of most steps, in a third of the time: 4 operations,
    not 16, and each costs several times its work where the last pass has driven its code and data
    out of the caches."""
    start = kv.lengths[first_row]
    # its slot is the first of those the pass is given
    indices = torch.arange(start, start + width, device=kv.device)
    skipped = kv.skipped[first_row]
    positions = indices + skipped if skipped else indices
    if start + skipped + width > last_position + 1:
        positions = positions.clamp(max=last_position)
    mask = partial(chain_mask, start, width, num_keys, kv.dtype, kv.device)
    return PassPlan(
        *_stores(kv, first_row), indices, mask, chain_keys=num_keys, starts=[start]
    ), positions[None]


def _plan_trees(
    kv: KVCache, parents: Tensor, num_keys: int, first_row: int, last_position: int
) -> tuple[PassPlan, Tensor]:
    """The plan of trees without a window, by NumPy.

    The general way takes some thirty small operations of torch. A draft that grows a tree plans a
    pass for every level.
    """
    depths, sees = ancestors_on_host(parents)
    num_rows, width = depths.shape
    lengths = kv.lengths[first_row : first_row + num_rows]
    starts = np.array(lengths)[:, None]
    indices = np.arange(num_rows)[:, None] * kv.capacity + starts + np.arange(width)
    texts = np.array(_texts(kv, first_row, num_rows))[:, None]
    positions = np.minimum(texts + depths, last_position)
    mask = partial(tree_mask, lengths, sees, num_keys, kv.dtype)
    plan = PassPlan(
        *_stores(kv, first_row), torch.from_numpy(indices.ravel()), mask, sees=sees, starts=lengths
    )
    return plan, torch.from_numpy(positions)


def _texts(kv: KVCache, first_row: int, num_rows: int) -> list[int]:
    """Per row, tokens of its text that stand in front of the pass."""
    return [kv.text_length(row) for row in range(first_row, first_row + num_rows)]


def _stores(kv: KVCache, first_row: int) -> tuple[list[Tensor], list[Tensor]]:
    if not first_row:
        return kv.keys, kv.values
    return [store[first_row:] for store in kv.keys], [store[first_row:] for store in kv.values]
