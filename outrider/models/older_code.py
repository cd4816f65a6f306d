"""Attention of model code that is older than transformers' interface for it, handed to that interface.

These families multiply queries with keys in a method of their own, `_attn`. Where the config names an attention that is
registered by us, the method asks the interface for it, as newer code does; else it is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from outrider.lazy import transformers

PLAIN = ("eager", "sdpa")  # what the method itself computes

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
    parts: list[Any] = [part for part in module.modules() if type(part).__name__ in TOLD and "_attn" not in vars(part)]
    for part in parts:
        part.layer_idx, scaling, window = TOLD[type(part).__name__](part, module.config)
        part._attn = partial(_attn, part, module.config, part._attn, scaling, window)
    models: list[Any] = [part for part in module.modules() if parts and isinstance(part, transformers.PreTrainedModel)]
    for model in models:
        model._can_set_attn_implementation = _yes  # transformers looks for a call of the interface in the source


def _yes() -> bool:
    return True


def _attn(
    part: Any, config: Any, plain: Callable[..., Any], scaling: float, window: int | None,
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
) -> Any:  # fmt: skip
    """(B, heads, T, size) each -> the same, and no weights."""
    if config._attn_implementation in PLAIN:
        return plain(query, key, value, attention_mask)
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in fp32
    out, weights = attend(part, query, key, value, attention_mask, scaling=scaling, sliding_window=window)
    return out.transpose(1, 2), weights
