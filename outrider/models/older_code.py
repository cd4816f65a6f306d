"""Attention of model code that is older than transformers' interface for it, handed to that interface.

Most of these families multiply queries with keys in a method of their own, `_attn`; Falcon does so in its layer's `forward`.
Where the config names an attention that is registered by us, the method asks the interface for it, as newer code does; else it
is what it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from outrider.lazy import transformers

PLAIN = ("eager", "sdpa", "flash_attention_2")  # what the method itself computes

# By the class of the attention module: its layer, scale and window
TOLD: dict[str, Callable[[Any, Any], tuple[int, float, int | None]]] = {
    "CodeGenAttention": lambda part, config: (part.layer_idx, 1 / part.scale_attn, None),
    "GPTJAttention": lambda part, config: (part.layer_idx, 1 / part.scale_attn, None),
    "GPTNeoSelfAttention": lambda part, config: (
        part.layer_id, 1.0, config.window_size if part.attention_type == "local" else None
    ),
    "GPTNeoXJapaneseAttention": lambda part, config: (part.layer_idx, 1 / part.norm_factor, None),
}  # fmt: skip


def hand_over(module: nn.Module) -> None:
    """Make a model of such a family ask transformers' interface for its attention. Others are left as they are."""
    parts: list[Any] = [part for part in module.modules() if _is_older(part)]
    for part in parts:
        if type(part).__name__ == "FalconAttention":
            part.forward = partial(_falcon, part, module.config, part.forward)
            continue
        part.layer_idx, scaling, window = TOLD[type(part).__name__](part, module.config)
        part._attn = partial(_attn, part, module.config, part._attn, scaling, window)
    models: list[Any] = [part for part in module.modules() if parts and isinstance(part, transformers.PreTrainedModel)]
    for model in models:
        model._can_set_attn_implementation = _yes  # transformers looks for a call of the interface in the source


def _is_older(part: nn.Module) -> bool:
    """Whether it is attention of such a family, and not handed over yet. ALiBi is nothing that our attention computes."""
    if type(part).__name__ == "FalconAttention":
        config: Any = part.config
        return "forward" not in vars(part) and not config.alibi
    return type(part).__name__ in TOLD and "_attn" not in vars(part)


def _yes() -> bool:
    return True


def _attn(
    part: Any, config: Any, plain: Callable[..., Any], scaling: float, window: int | None,
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
) -> Any:  # fmt: skip
    """(B, heads, T, size) each -> the same, and no weights."""
    if config._attn_implementation in PLAIN:
        return plain(query, key, value, attention_mask)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in fp32
    out, weights = _interface(config)(part, query, key, value, attention_mask, scaling=scaling, sliding_window=window)
    return out.transpose(1, 2), weights


def _falcon(part: Any, config: Any, plain: Callable[..., Any], hidden_states: Tensor, **told: Any) -> Any:
    """(B, T, hidden size) -> the same, and no weights."""
    if config._attn_implementation in PLAIN:
        return plain(hidden_states, **told)
    fused, size = part.query_key_value(hidden_states), part.head_dim
    if part.new_decoder_architecture:  # each head of keys behind its queries
        fused = fused.unflatten(2, (part.num_kv_heads, -1, size))
        query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    elif part.multi_query:
        fused = fused.unflatten(2, (-1, size))
        query, key, value = fused[..., :-2, :], fused[..., -2:-1, :], fused[..., -1:, :]
    else:
        query, key, value = fused.unflatten(2, (-1, 3, size)).unbind(3)
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    rotate = sys.modules[type(part).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *told["position_embeddings"])
    out, weights = _interface(config)(part, query, key, value, told["attention_mask"])
    return part.dense(out.flatten(2)), weights


def _interface(config: Any) -> Callable[..., Any]:
    return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
