"""EAGLE and EAGLE-3 heads: a decoder layer or few that continue what the target thinks, one token
at a time.

    pair t of a text:  (token x_{t+1}, feature g_t)  ->  state o_t  ->  logits of x_{t+2}

where g_t is made of the target's hidden states at position t. When drafting, the pair after the
last known feature takes the head's own state instead (`carry`): a guess at the feature, good for a
few tokens, so every committed token is fed again with the target's feature.

    EAGLE   (Li et al. 2401.15077)  g = what the target's output head reads; input fc [embedding ; g]; the layer has no first
            norm; the target's own output head reads the state
    EAGLE-3 (2503.01840)  g = fc [hidden states entering three layers]; the layer reads [norm(embedding) ; norm(g)], so its
            projections are twice as wide; a norm and an output head of its own, often over a part
            of the vocabulary

P-EAGLE (2602.01469) is an EAGLE-3 head, often of several layers, that drafts in one pass: after the
last known feature it is fed a mask token and a learned feature for every further guess.

Published heads differ in small ways that cost most of the acceptance when ignored: all are fields
of `EagleConfig`. Attention is the caller's (`Attend`): over a cache when drafting, over an unrolled
text in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from outrider.errors import CapabilityError
from outrider.kv import LayerShape
from outrider.models.attention import attend
from outrider.models.pass_plan import PassPlan
from outrider.models.signals import AFTER_NORM
from outrider.models.tokens.vocabulary import OUTSIDE

# (layer, query (B, heads, T, D), key (B, KV heads, T, D), value) -> (B, T, heads, D)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Kind = Literal["eagle", "eagle3"]
# whose rotation of a position never depends on the text's length
STEADY_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class EagleConfig:
    """Shapes, and every choice by which published heads differ."""

    kind: Kind
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # equal to it where the head knows every token
    num_layers: int = 1
    # the target's hidden states that make a feature, by the keys of `models/signals.py`
    signals: tuple[int, ...] = (AFTER_NORM,)
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    # None: its files do not say, so as far as the target
    max_position_embeddings: int | None = None
    fc_bias: bool = False
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of what attention gives
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3's norms of queries and keys
    norm_before_residual: bool = False  # eagle3: the first layer's residual is the normed feature
    norm_before_fc: bool = False  # eagle3: one norm over the joined hidden states
    fc_norm: bool = False  # eagle3 (3.1): a norm for each of them
    # eagle3 (3.1): the state after the final norm is carried, not the one before it
    norm_output: bool = False
    # eagle3 (P-EAGLE): what is fed, with the feature `mask_hidden`, in place of tokens and features
    # that nobody knows yet
    mask_token: int | None = None
    own_embedding: bool = False  # else the target's
    own_output: bool = True  # else the target's
    logit_scale: float = 1.0
    trained_for: str = ""  # name of the target

    @property
    def feature_size(self) -> int:
        """Width of the hidden states a feature is made of, side by side."""
        return len(self.signals) * self.target_hidden_size


class EagleAttention(nn.Module):
    """Projections and rotation; the attending itself is `attend`'s."""

    def __init__(self, config: EagleConfig, layer: int, inputs: int) -> None:
        super().__init__()
        size = config.head_dim
        bias = config.attention_bias
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        self.layer = layer
        self.head_dim = size
        self.q_proj = nn.Linear(inputs, heads * size, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=config.output_bias)
        self.q_norm = LlamaRMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = LlamaRMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """(B, T, inputs) -> (B, T, H)."""
        q, k, v = (
            projection(x).view(*x.shape[:2], -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rotation)
        return self.o_proj(attend(self.layer, q, k, v.transpose(1, 2)).flatten(2))


class EagleMLP(nn.Module):
    """Gated, as Llama's."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """One decoder layer. The first one of EAGLE-3 also reads the embedding, the first one of EAGLE
    norms nothing first."""

    def __init__(self, config: EagleConfig, layer: int) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

        first = layer == 0
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = norm() if first and config.kind == "eagle3" else None
        self.input_layernorm = norm() if not first or config.kind == "eagle3" else None
        self.self_attn = EagleAttention(
            config, layer, config.hidden_size * (2 if self.hidden_norm is not None else 1)
        )
        self.post_attention_layernorm = norm()
        self.mlp = EagleMLP(config)

    def forward(
        self, hidden: Tensor, embeds: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """(B, T, H) -> (B, T, H); `embeds` (B, T, H) of the pairs' tokens."""
        x = residual = hidden
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        elif self.input_layernorm is not None:
            x = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(x, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """The network of an EAGLE or EAGLE-3 head.

    Where embedding or output are the target's, `bind` must name them before the first pass.
    """

    # (Vd,) int64: the target's id of every token the head knows; None: all
    draft_ids: Tensor | None
    window: int | None = None  # it sees all of a text

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_ids", draft_ids)
        if config.kind == "eagle3":
            self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=config.fc_bias)
        else:
            self.fc = nn.Linear(
                config.hidden_size + config.feature_size, config.hidden_size, bias=config.fc_bias
            )
        eps = config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(config.feature_size, eps) if config.norm_before_fc else None
        each = (
            [LlamaRMSNorm(config.target_hidden_size, eps) for _ in config.signals]
            if config.fc_norm
            else None
        )
        self.fc_norm = None if each is None else nn.ModuleList(each)
        self.mask_hidden = (
            None if config.mask_token is None else nn.Parameter(torch.zeros(config.feature_size))
        )
        self.layers = nn.ModuleList(EagleLayer(config, layer) for layer in range(config.num_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps) if config.kind == "eagle3" else None
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            if config.own_output
            else None
        )
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        )
        self.rotary = LlamaRotaryEmbedding(_rope_config(config))
        # the target's, so no children of ours: neither saved nor trained
        self._shared: dict[str, Any] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EagleHead:
        """Applies `fn` to the weights as any module does, but keeps the frequencies of the rotary
        embedding in fp32."""
        super()._apply(fn, recurse)
        self.rotary = LlamaRotaryEmbedding(_rope_config(self.config)).to(
            next(self.parameters()).device
        )
        return self

    def bind(self, embedding: Tensor, output: Callable[[Tensor], Tensor]) -> EagleHead:
        """The target's embedding (V, H) and output head (..., H) -> (..., V), where the head has
        none of its own."""
        self._shared = {"embedding": embedding, "output": output}
        return self

    @property
    def embedding(self) -> Tensor:
        """(V, H): its own or the target's."""
        return self._shared["embedding"] if self.embed_tokens is None else self.embed_tokens.weight

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        """(..., H) -> (..., Vd): its own output layer or the target's."""
        return self._shared["output"] if self.lm_head is None else self.lm_head

    @property
    def output_parameters(self) -> list[Tensor]:
        """The head's own tensors that `logits` reads."""
        return [
            tensor
            for layer in (self.norm, self.lm_head)
            if layer is not None
            for tensor in layer.parameters()
        ]

    @property
    def dtype(self) -> torch.dtype:
        layer: Any = self.layers[0]
        # a norm's: linears may be packed
        dtype: torch.dtype = layer.post_attention_layernorm.weight.dtype
        return dtype

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """The shape of a token's cache entry, for each layer."""
        config = self.config
        return [
            LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        ] * config.num_layers

    def features(self, hidden: dict[int, Tensor]) -> Tensor:
        """g, (..., H), from the target's hidden states (..., target H) by signal."""
        return self.fuse(self.join(hidden))

    def join(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The target's hidden states that make a feature, side by side: (..., F) of
        `EagleConfig.feature_size` numbers."""
        dtype = self.dtype
        states = [hidden[signal].to(dtype) for signal in self.config.signals]
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1)

    def fuse(self, joined: Tensor) -> Tensor:
        """g, (..., H), from what `join` gives (..., F)."""
        if self.config.kind == "eagle":
            return joined
        if self.fc_norm is not None:
            parts = joined.split(self.config.target_hidden_size, dim=-1)
            joined = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """States o (B, T, H) of the pairs (tokens (B, T), features (B, T, H)) at positions (B, T)."""
        return self.states(F.embedding(tokens, self.embedding), features, positions, attend)

    def on_cache(
        self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan
    ) -> Tensor:
        """The outputs of `forward`, attending over a cache."""
        return self(tokens, features, positions, partial(attend, plan))

    def states(self, embeds: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of pairs whose tokens are embedded already, (B, T, H)."""
        embeds = embeds.to(features.dtype)
        hidden = (
            self.fc(torch.cat([embeds, features], dim=-1))
            if self.config.kind == "eagle"
            else features
        )
        rotation = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, embeds, rotation, attend)
        return hidden

    def carry(self, states: Tensor) -> Tensor:
        """The features of the pairs that follow, as far as the head can tell: (..., H) -> (..., H)."""
        return self.norm(states) if self.norm is not None and self.config.norm_output else states

    def logits(self, states: Tensor) -> Tensor:
        """(..., H) -> (..., Vd), over the draft vocabulary."""
        states = states if self.norm is None else self.norm(states)
        if self.lm_head is not None:
            logits = self.output(states)
        else:  # the target's: in training the head is fp32, whatever the target is
            logits = self.output(states.to(self._shared["embedding"].dtype)).to(states.dtype)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def in_full(self, logits: Tensor) -> Tensor:
        """(..., Vd) -> (..., V): over the target's vocabulary, `OUTSIDE` for tokens the head does
        not know."""
        if self.draft_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), OUTSIDE)
        return full.index_copy_(-1, self.draft_ids, logits)


def _rope_config(config: EagleConfig) -> LlamaConfig:
    """The config that transformers' rotary embedding reads. Raises CapabilityError for kinds that
    depend on the length of the text."""
    kind = config.rope.get("rope_type", "default")
    if kind not in STEADY_ROPE:
        raise CapabilityError(
            f"the head's rotary embedding '{kind}' is not supported; known are "
            f"{', '.join(STEADY_ROPE)}"
        )
    return LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rope_parameters=dict(config.rope),
        max_position_embeddings=config.max_position_embeddings or 2048,
    )
