"""DSpark as DeepSeek V4 ships it, inside the target's checkpoint: a block head of the target's own kind of layers.

    residual    `hc_mult` streams, mixed in and out of every part by hyper-connections, collapsed at the end
    attention   one key head that is also the value, a sink for each head, the context's last `window` positions and the block
    MLP         routed experts and a shared one

Everything around the layers (context, Markov head, confidence head, cache) is any block head's. The layers are transformers'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from outrider.models.heads.block import Attend, BlockHead
from outrider.models.heads.block_config import BlockConfig


class V4BlockHead(BlockHead):
    """A block head of layers of DeepSeek V4."""

    def __init__(self, config: BlockConfig, text: Any) -> None:
        """`text`: of transformers, sizes of its layers."""
        layers = nn.ModuleList(v4.DeepseekV4DecoderLayer(text, index) for index in range(config.num_layers))
        super().__init__(config, layers=layers)
        self._streams, self._groups = text.hc_mult, text.o_groups
        self.hc_head = v4.DeepseekV4HyperHead(text)
        self.__dict__["_rotary"] = v4.DeepseekV4RotaryEmbedding(text)

    def sinks(self, layer: int) -> Tensor:
        """See `BlockHead`."""
        return self._layer(layer).self_attn.sinks

    def context_keys(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See `BlockHead`: keys are values, too."""
        angles = self._angles(context, positions)
        keys = [_keys(layer, context, angles) for layer in self.layers]
        return [(each, each) for each in keys]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `BlockHead`."""
        states = self.embed(tokens)
        angles = self._angles(states, positions)
        streams = states[:, :, None].expand(-1, -1, self._streams, -1).contiguous()
        for index in range(len(self.layers)):
            layer = self._layer(index)

            def attended(normed: Tensor, index: int = index, layer: Any = layer) -> Tensor:
                keys = _keys(layer, normed, angles)
                mixed = attend(index, _queries(layer, normed, angles), keys, keys)
                cos, sin = angles
                whole = v4.apply_rotary_pos_emb(mixed, cos, -sin).transpose(1, 2)  # keys are rotated, values must not be
                grouped = layer.self_attn.o_a_proj(whole.flatten(2).unflatten(-1, (self._groups, -1)))
                return layer.self_attn.o_b_proj(grouped.flatten(2))

            streams = _around(layer.attn_hc, layer.input_layernorm, attended, streams)
            streams = _around(layer.ffn_hc, layer.post_attention_layernorm, layer.mlp, streams)
        return self.norm(self.hc_head(streams))

    def _layer(self, index: int) -> Any:
        return self.layers[index]

    def _angles(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rotary: Any = self.rotary
        if rotary.main_inv_freq.device != states.device:
            rotary.to(states.device)
        return rotary(states, positions, layer_type="main")


def _keys(layer: Any, states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """(B, T, H) -> (B, 1, T, D), rotated."""
    attention = layer.self_attn
    return v4.apply_rotary_pos_emb(attention.kv_norm(attention.kv_proj(states))[:, None], *angles)


def _queries(layer: Any, states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """(B, S, H) -> (B, heads, S, D), rotated."""
    attention = layer.self_attn
    made = attention.q_b_proj(attention.q_a_norm(attention.q_a_proj(states)))
    return v4.apply_rotary_pos_emb(attention.q_b_norm(made.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)), *angles)


def _around(hyper: nn.Module, norm: nn.Module, part: Callable[[Tensor], Tensor], streams: Tensor) -> Tensor:
    """Streams (B, S, streams, H) behind a part of a layer."""
    post, mixing, collapsed = hyper(streams)
    made = part(norm(collapsed))
    return post.to(streams.dtype)[..., None] * made[..., None, :] + torch.matmul(mixing.to(streams.dtype).mT, streams)
