"""BLOOM: attention with ALiBi that is older than transformers' interface for attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def _sloped(part: Any, config: Any) -> Callable[..., Any] | None:
    """None where a matrix product is made in slices, as in training on several devices."""
    if part.pretraining_tp > 1 and part.slow_but_exact:
        return None
    positions = torch.ones(1, 2, dtype=torch.int64, device=part.dense.weight.device)
    slopes = sys.modules[type(part).__module__].build_alibi_tensor(
        positions, part.num_heads, torch.float32
    )[:, 0, 1]
    return partial(_attend, part, slopes.contiguous())


def _attend(
    part: Any,
    slopes: Tensor,
    attend: Callable[..., Any],
    hidden_states: Tensor,
    residual: Tensor,
    **options: Any,
) -> Any:
    """(B, T, hidden size) -> the same, and no weights.

    Slopes times distances are fp32 here; its own code rounds slopes times positions to the model's
    type.
    """
    query, key, value = part._reshape(part.query_key_value(hidden_states))
    mask = options["attention_mask"]
    scaling = part.inv_norm_factor
    out, weights = attend(part, query, key, value, mask, scaling=scaling, alibi_slopes=slopes)
    return part.dense(out.flatten(2)) + residual, weights


ATTENTION = {"BloomAttention": _sloped}
