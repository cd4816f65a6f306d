"""Gemma 4: a router whose shares are scaled by a number of each expert, in operations that can be recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _route(layer: Any, sums: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All experts' scores, the chosen ones' shares, and their numbers."""
    x = layer.norm(hidden_states) * layer.scale * layer.scalar_root_size
    scores = torch.softmax(layer.proj(x), dim=-1, dtype=torch.float32)
    shares, index = scores.topk(layer.config.top_k_experts, dim=-1)
    scales = (scores * 0 + layer.per_expert_scale).gather(1, index)
    return scores, shares / shares.sum(dim=-1, keepdim=True) * scales, index


RECORDED = {"Gemma4TextRouter": _route}
