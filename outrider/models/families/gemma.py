"""Gemma 4: its router, in operations that can be recorded, and its assistants.

Experts' shares are scaled by a number of each expert. Assistants are small decoders that draft on
the target's own keys and values (`models/heads/assistant.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.models.heads.names import Names


@dataclass(frozen=True)
class Assistants:
    """The names of assistants in folders, in transformers and in GGUF files."""

    model_types: tuple[str, ...]
    decoders: tuple[str, ...]  # the classes of their decoders' configs
    architecture: str  # in GGUF files
    like: str  # the architecture of the target's, whose metadata theirs is
    names: Names  # of GGUF files, and of transformers' module


ASSISTANTS = Assistants(
    model_types=("gemma4_assistant", "gemma4_unified_assistant"),
    decoders=("Gemma4TextConfig", "Gemma4UnifiedTextConfig"),
    architecture="gemma4-assistant",
    like="gemma4",
    names=Names(
        ("blk.{layer}.attn_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
        (
            "blk.{layer}.post_attention_norm.weight",
            "model.layers.{layer}.post_attention_layernorm.weight",
        ),
        ("blk.{layer}.ffn_norm.weight", "model.layers.{layer}.pre_feedforward_layernorm.weight"),
        (
            "blk.{layer}.post_ffw_norm.weight",
            "model.layers.{layer}.post_feedforward_layernorm.weight",
        ),
        ("blk.{layer}.attn_q.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
        ("blk.{layer}.attn_q_norm.weight", "model.layers.{layer}.self_attn.q_norm.weight"),
        ("blk.{layer}.attn_output.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
        ("blk.{layer}.ffn_gate.weight", "model.layers.{layer}.mlp.gate_proj.weight"),
        ("blk.{layer}.ffn_up.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        ("blk.{layer}.ffn_down.weight", "model.layers.{layer}.mlp.down_proj.weight"),
        ("blk.{layer}.layer_output_scale.weight", "model.layers.{layer}.layer_scalar"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("nextn.pre_projection.weight", "pre_projection.weight"),
        ("nextn.post_projection.weight", "post_projection.weight"),
    ),
)


def _route(layer: Any, sums: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All experts' scores, the chosen ones' shares, and their numbers."""
    x = layer.norm(hidden_states) * layer.scale * layer.scalar_root_size
    scores = torch.softmax(layer.proj(x), dim=-1, dtype=torch.float32)
    shares, index = scores.topk(layer.config.top_k_experts, dim=-1)
    scales = (scores * 0 + layer.per_expert_scale).gather(1, index)
    return scores, shares / shares.sum(dim=-1, keepdim=True) * scales, index


RECORDED = {"Gemma4TextRouter": _route}
