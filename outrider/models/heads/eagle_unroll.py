"""An EAGLE or MTP head over a whole text, as it would draft behind every position at once: the training-time test (2503.01840).

Unroll j continues, at every t, the chain that begins behind feature g_t. Its query at t sees the pairs of unroll 0 up to t, which
are real, and of the unrolls in between its own chain alone: one key each, on the diagonal.

    unroll 2, t = 3:   keys  K0[0..3]   K1[3]   K2[3]      at positions 0..3, 4, 5

So a text of T tokens is drafted behind T - 1 times with the arithmetic of `unrolls` passes. `tests/unit/train/test_eagle.py`
holds it against real drafting, step by step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.mtp import MtpHead


def unrolled(head: EagleHead | MtpHead, tokens: Tensor, features: Tensor, unrolls: int) -> Iterator[Tensor]:
    """States (B, T-1, H) of every unroll: [t] of the j-th guesses x_{t+2+j}, having read x_{t+1} .. x_{t+1+j}.

    `tokens` (B, T) and `features` (B, T, H) of one text each. Where x_{t+1+j} does not exist, states mean nothing.
    """
    memory = _ChainMemory(len(head.layer_shapes))
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
    given = features[:, :-1]
    for step in range(unrolls):
        read = F.pad(tokens[:, 1 + step :], (0, min(step, positions.shape[1])))[:, : positions.shape[1]]
        states = head(read, given, positions + step, memory.attend)
        yield states
        given = head.carry(states)


class _ChainMemory:
    """Keys and values of every layer: those of unroll 0, then one per position and unroll."""

    def __init__(self, num_layers: int) -> None:
        self._keys: list[list[Tensor]] = [[] for _ in range(num_layers)]  # each (B, heads, T, D)
        self._values: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
        """Attention of one unroll, whose keys and values join the memory. Softmax in fp32."""
        groups = query.shape[1] // key.shape[1]
        keys, values = self._keys[layer], self._values[layer]
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        if len(keys) == 1:
            return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, scale=scaling).transpose(1, 2)
        length = query.shape[2]
        scores = query @ keys[0].transpose(2, 3)  # (B, heads, T, T)
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        own = [(query * chain).sum(-1, keepdim=True) for chain in keys[1:]]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = torch.cat([scores.masked_fill(future, float("-inf")), *own], dim=-1) * scale
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        out = weights[..., :length] @ values[0]
        for number, chain in enumerate(values[1:]):
            out = out + weights[..., length + number, None] * chain
        return out.transpose(1, 2)
