"""MiniMax: lightning attention, whose own code loops over blocks of a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _attend(
    layer: Any, sums: Any, hidden_states: Tensor, *unused: object, **also: object
) -> tuple[Tensor, None]:
    """A delta rule that corrects nothing, each head's states decaying at a rate of its own."""
    heads = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(
        -1, (layer.num_attention_heads, -1)
    )
    query, key, value = heads.split(layer.head_dim, dim=3)
    decay = torch.zeros_like(query[..., 0], dtype=torch.float32) - layer.slope_rate[:, 0, 0].float()
    normed = layer.norm(sums(query, key, value, decay).reshape(*hidden_states.shape[:2], -1))
    return layer.out_proj(functional.sigmoid(layer.output_gate(hidden_states)) * normed), None


RECORDED = {"MiniMaxLightningAttention": _attend}
