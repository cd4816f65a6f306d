"""Falcon: attention that is older than transformers' interface for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor


def _rotated(part: Any, config: Any) -> Callable[..., Any] | None:
    """None with ALiBi, for which its own code rounds positions in its own way."""
    return None if config.alibi else partial(_attend, part)


def _attend(part: Any, attend: Callable[..., Any], hidden_states: Tensor, **options: Any) -> Any:
    """(B, T, hidden size) -> the same, and no weights."""
    fused = part.query_key_value(hidden_states)
    size = part.head_dim
    if part.new_decoder_architecture:  # each head of keys after its queries
        fused = fused.unflatten(2, (part.num_kv_heads, -1, size))
        query = fused[..., :-2, :].flatten(2, 3)
        key = fused[..., -2, :]
        value = fused[..., -1, :]
    elif part.multi_query:
        fused = fused.unflatten(2, (-1, size))
        query = fused[..., :-2, :]
        key = fused[..., -2:-1, :]
        value = fused[..., -1:, :]
    else:
        query, key, value = fused.unflatten(2, (-1, 3, size)).unbind(3)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    rotate = sys.modules[type(part).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *options["position_embeddings"])
    out, weights = attend(part, query, key, value, options["attention_mask"])
    return part.dense(out.flatten(2)), weights


ATTENTION = {"FalconAttention": _rotated}
