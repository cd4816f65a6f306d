"""Attention of model code that is older than transformers' interface for it, handed to that interface.

Some of these families multiply queries with keys in a method of their own, `_attn`, others in their layer's `forward`. Where the
config names an attention that is registered by us, that method asks the interface for it, as newer code does; else it is what
it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.lazy import transformers
from outrider.models.indexer import keep_choices
from outrider.models.latent import keep_latents

PLAIN = ("eager", "sdpa", "flash_attention_2")  # attention for which the code's own scales of queries are right


def hand_over(module: nn.Module) -> None:
    """Make a model of such a family ask transformers' interface for its attention; others hand it latents, or queries' scales.

    Indexers ask us for their choices.
    """
    keep_latents(module)
    keep_choices(module)
    scale_by_position(module)
    parts: list[Any] = [part for part in module.modules() if type(part).__name__ in OLDER]
    for part in parts:
        method, make = OLDER[type(part).__name__]
        if method not in vars(part) and (ours := make(part, module.config)) is not None:
            setattr(part, method, partial(_either, module.config, getattr(part, method), ours))
    models: list[Any] = [part for part in module.modules() if parts and isinstance(part, transformers.PreTrainedModel)]
    for model in models:
        model._can_set_attn_implementation = _yes  # transformers looks for a call of the interface in the source


def _yes() -> bool:
    return True


def _either(config: Any, plain: Callable[..., Any], ours: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the method was, or what it is made to be where the config names another attention."""
    if config._attn_implementation in PLAIN:
        return plain(*args, **options)
    return ours(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[config._attn_implementation], *args, **options)


# ---------------------------------------------------------------- `_attn`


def _scaled(part: Any, config: Any) -> Callable[..., Any]:
    return partial(_attn, part, 1 / part.scale_attn, None)


def _scaled_japanese(part: Any, config: Any) -> Callable[..., Any]:
    return partial(_attn, part, 1 / part.norm_factor, None)


def _local(part: Any, config: Any) -> Callable[..., Any]:
    part.layer_idx = part.layer_id
    return partial(_attn, part, 1.0, config.window_size if part.attention_type == "local" else None)


def _attn(
    part: Any, scaling: float, window: int | None, attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None = None,
) -> Any:  # fmt: skip
    """(B, heads, T, size) each -> the same, and no weights."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in fp32
    out, weights = attend(part, query, key, value, attention_mask, scaling=scaling, sliding_window=window)
    return out.transpose(1, 2), weights


# ---------------------------------------------------------------- `forward`: (B, T, hidden size) -> the same, and no weights


def _rotated(part: Any, config: Any) -> Callable[..., Any] | None:
    """Falcon's, without ALiBi: with it, it rounds positions in its own way."""
    return None if config.alibi else partial(_falcon, part)


def _falcon(part: Any, attend: Callable[..., Any], hidden_states: Tensor, **options: Any) -> Any:
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
    query, key = rotate(query, key, *options["position_embeddings"])
    out, weights = attend(part, query, key, value, options["attention_mask"])
    return part.dense(out.flatten(2)), weights


def _sloped(part: Any, config: Any) -> Callable[..., Any] | None:
    """BLOOM's. None where a matrix product is made in slices, as in training on several devices."""
    if part.pretraining_tp > 1 and part.slow_but_exact:
        return None
    slopes = sys.modules[type(part).__module__].build_alibi_tensor(_two_positions(part), part.num_heads, torch.float32)[:, 0, 1]
    return partial(_bloom, part, slopes.contiguous())


def _bloom(
    part: Any, slopes: Tensor, attend: Callable[..., Any], hidden_states: Tensor, residual: Tensor, **options: Any
) -> Any:
    """Slopes times distances are fp32 here; its own code rounds slopes times positions to the model's type."""
    query, key, value = part._reshape(part.query_key_value(hidden_states))
    mask, scaling = options["attention_mask"], part.inv_norm_factor
    out, weights = attend(part, query, key, value, mask, scaling=scaling, alibi_slopes=slopes)
    return part.dense(out.flatten(2)) + residual, weights


def _two_positions(part: Any) -> Tensor:
    return torch.ones(1, 2, dtype=torch.int64, device=part.dense.weight.device)


# By the class of the attention module: the method, and what makes ours of (part, config); None: it stays what it was
OLDER: dict[str, tuple[str, Callable[[Any, Any], Callable[..., Any] | None]]] = {
    "CodeGenAttention": ("_attn", _scaled),
    "GPTJAttention": ("_attn", _scaled),
    "GPTNeoSelfAttention": ("_attn", _local),
    "GPTNeoXJapaneseAttention": ("_attn", _scaled_japanese),
    "FalconAttention": ("forward", _rotated),
    "BloomAttention": ("forward", _sloped),
}


def scale_by_position(module: nn.Module) -> None:
    """Hand scales of queries to our attention, which multiplies by them; for transformers' attention the layer's own code does.

    Llama 4 multiplies queries of layers without rotary positions by a number that grows with the position, and counts positions
    from the first token of the pass or of transformers' cache. A pass on our cache may begin anywhere, in each row elsewhere.
    """
    for part in module.modules():
        own: Any = getattr(part, "self_attn", None)
        has_scales = getattr(own, "attn_temperature_tuning", False) and not own.use_rope
        if has_scales and _hand_over_scales not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_hand_over_scales, with_kwargs=True)


def _hand_over_scales(layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = layer.self_attn
    own.attn_temperature_tuning = own.config._attn_implementation in PLAIN
    if own.attn_temperature_tuning:
        return args, options
    steps = torch.floor((options["position_ids"].float() + 1.0) / own.floor_scale)
    scales = torch.log1p(steps) * own.attn_scale + 1.0
    return args, {**options, "query_scales": scales[:, None, :, None]}
