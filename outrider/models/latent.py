"""Latent attention (MLA) over the compressed cache: one vector of a token serves the keys and the
values of all heads.

    transformers' code     keys and values of each head = the matrix `kv_b_proj` times the latent; the queries see those
    the same, absorbed     each head's queries times its key half of the matrix see the latents themselves, and what they get
                           of them is multiplied with the head's value half

So the cache holds the latent and the rotated part of the key, `kv_lora_rank + qk_rope_head_dim`
numbers of a token and layer, as one key that all heads share; its first `kv_lora_rank` numbers are
the value. Both ways give the same up to rounding. Every pass takes this one, whatever its width,
since a token must not get other bits in another pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.gguf.linear import BlockLinear, ReorderedLinear

ABSORBED: set[str] = set()  # names of attention functions that are given latents
MATRIX = "kv_b_proj"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class LatentProduct(nn.Module):
    """Stands in for `kv_b_proj`: its weight by heads and halves, which are multiplied from both
    sides, so in no blocks."""

    def __init__(self, linear: Any, key_size: int, value_size: int) -> None:
        """`linear`: with a plain weight, or in blocks, of which a plain copy is made."""
        super().__init__()
        plain = linear.weight
        self.weight = (
            plain if isinstance(plain, nn.Parameter) else nn.Parameter(plain, requires_grad=False)
        )
        self.key_size = key_size
        self.value_size = value_size

    @property
    def num_heads(self) -> int:
        return len(self.weight) // (self.key_size + self.value_size)

    @property
    def rank(self) -> int:
        return self.weight.shape[1]

    # (..., rank) -> (..., heads * (key size + value size))
    def forward(self, latent: Tensor) -> Tensor:
        """The expansion of transformers' code, for those who attend over it."""
        return nn.functional.linear(latent, self.weight)

    def to_latent(self, query: Tensor) -> Tensor:  # (B, T, heads, key size) -> (B, T, heads, rank)
        """The queries that see latents as these queries see keys."""
        return _by_head(query, self._weights()[:, : self.key_size])

    # (B, T, heads, rank) -> (B, T, heads, value size)
    def from_latent(self, attended: Tensor) -> Tensor:
        """The values that each head gets, from the latents it attended to."""
        return _by_head(attended, self._weights()[:, self.key_size :].transpose(1, 2))

    def _weights(self) -> Tensor:
        """(heads, key size + value size, rank)"""
        return self.weight.unflatten(0, (self.num_heads, -1))


def _by_head(x: Tensor, weights: Tensor) -> Tensor:
    """x (B, T, heads, in) times weights (heads, in, out)."""
    return (
        torch.bmm(x.flatten(0, 1).transpose(0, 1), weights)
        .transpose(0, 1)
        .unflatten(0, x.shape[:2])
    )


def has_latents(part: nn.Module) -> bool:
    """Whether a part of a model is latent attention that `keep_latents` knows."""
    return hasattr(type(part), "expand_kv")


def keep_latents(module: nn.Module) -> None:
    """Attention functions of ours are given latents by this model's code from now on, if its
    attention has them.

    Where the matrix stays quantised in transformers' code, they are given heads.
    """
    parts: list[Any] = [part for part in module.modules() if has_latents(part)]
    for part in parts:
        if _can_be_split(part.kv_b_proj):
            part.kv_b_proj = LatentProduct(part.kv_b_proj, part.qk_nope_head_dim, part.v_head_dim)
            part.expand_kv = partial(_expand, part.config, part.expand_kv)


def _can_be_split(linear: Any) -> bool:
    """Whether a layer only multiplies with its `weight`.

    Those that stay quantised in transformers' code keep integers there, or scales next to it.
    """
    if type(linear) not in (nn.Linear, BlockLinear, ReorderedLinear) or linear.bias is not None:
        return False
    scaled = any(
        "scale" in name for name, _ in (*linear.named_parameters(), *linear.named_buffers())
    )
    return (
        not scaled
        and linear.weight.dtype in FLOATS
        and type(linear.weight) in (nn.Parameter, Tensor)
    )


def _expand(
    config: Any, plain: Callable[..., Any], latent: Tensor, rotated: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values, (B, heads or 1, T, size) each."""
    if config._attn_implementation not in ABSORBED:
        return plain(latent, rotated)
    key = torch.cat([latent, rotated], dim=-1)
    return key, key[..., : latent.shape[-1]]


def absorbed(function: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function by transformers' contract, of modules with latents, too: their calls
    have `values_in_keys`."""
    return partial(_absorbed, function)


def _absorbed(
    function: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,
    **options: Any,
) -> Any:
    product = getattr(module, MATRIX, None)
    if not isinstance(product, LatentProduct):
        return function(module, query, key, value, *others, **options)
    by_token = query.transpose(1, 2)
    seen = product.to_latent(by_token[..., : product.key_size])
    query = torch.cat([seen, by_token[..., product.key_size :]], dim=-1).transpose(1, 2)
    out, weights = function(module, query, key, value, *others, values_in_keys=True, **options)
    return product.from_latent(out), weights
