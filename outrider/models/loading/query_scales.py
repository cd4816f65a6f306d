"""Scales of queries that transformers' code takes from a token's place in its pass, by the token's position instead.

Llama 4 multiplies queries of layers without rotary positions by a number that grows with the position, and counts positions from
the first token of the pass or of transformers' cache. A pass on our cache may begin anywhere, in each row elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PLAIN = ("eager", "sdpa", "flash_attention_2")  # attention for which the code's own scales are right


def scale_by_position(module: nn.Module) -> None:
    """Hand the scales to our attention, which multiplies by them; the layer's own code does so for transformers' attention."""
    for part in module.modules():
        own: Any = getattr(part, "self_attn", None)
        has_scales = getattr(own, "attn_temperature_tuning", False) and not own.use_rope
        if has_scales and _hand_over not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _hand_over(layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = layer.self_attn
    own.attn_temperature_tuning = own.config._attn_implementation in PLAIN
    if own.attn_temperature_tuning:
        return args, options
    steps = torch.floor((options["position_ids"].float() + 1.0) / own.floor_scale)
    scales = torch.log1p(steps) * own.attn_scale + 1.0
    return args, {**options, "query_scales": scales[:, None, :, None]}
