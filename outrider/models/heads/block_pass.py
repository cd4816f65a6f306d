"""A block head's pass over its cache.

The pass takes the target's states of the tokens that were committed since the last one, puts their keys and values behind what
the cache holds, the block's own behind these, and attends from the block to all of them:

    slot of a row   [ cached ][ waiting: count ][ block ][ padding of shorter rows ]

What waits becomes context; the block and the padding are overwritten by the next pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.models.attention import PassPlan, attention
from outrider.models.heads.block import BlockHead


@dataclass(frozen=True)
class _Layer:
    """What our attention reads of a layer."""

    layer_idx: int


def block_pass(
    head: BlockHead,
    numbers: Tensor,  # (B, 4) int64 per row: pending token, states that wait, cached positions, text index of the pending token
    hidden: list[Tensor],  # per target layer of the head (B, W, target H), each row's waiting states first
    num_keys: int,  # of the cache to look at, a multiple of its block
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """States (B, block size, H) of one block behind every row. The cache must have room for W + block size more positions."""
    config = head.config
    anchors, counts, cached, ends = numbers.unbind(1)
    waiting = torch.arange(hidden[0].shape[1], device=numbers.device)
    block = torch.arange(config.block_size, device=numbers.device)
    last = config.max_positions - 1
    positions = ((ends - counts)[:, None] + waiting).clamp(min=0, max=last)  # of padding: any
    context = head.context_keys(head.context(hidden), positions)
    behind = torch.where(waiting < counts[:, None], waiting, waiting + config.block_size)  # padding goes behind the block
    slots = torch.arange(numbers.shape[0], device=numbers.device) * keys[0].shape[1]
    places = (slots + cached)[:, None] + torch.cat([behind, counts[:, None] + block], dim=1)
    mask = partial(config.mask, cached + counts, num_keys, keys[0].dtype)
    plan = PassPlan(keys, values, places.flatten(), mask)

    def attend(layer: int, queries: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
        all_keys = torch.cat([context[layer][0], own_keys], dim=2)
        all_values = torch.cat([context[layer][1], own_values], dim=2)
        return attention(_Layer(layer), queries, all_keys, all_values, None, outrider_plan=plan)[0].transpose(1, 2)

    return head(head.block_tokens(anchors), (ends[:, None] + block).clamp(max=last), attend)
