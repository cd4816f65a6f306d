"""A block head: a few layers that guess a whole block of tokens in one pass (DFlash, 2602.06036;
DSpark, 2607.05147).

    context    c_t = RMSNorm(fc [h_t of the selected target layers])        for every position the target was fed
    block      embeddings of [last token, mask, mask, ...], at the positions that follow the context
    layer      queries from the block alone; keys and values from [context ; block], all see all inside the block,
               unless the head is causal; sliding layers see this many positions back
    logits     output layer of the target over RMSNorm of the last layer, one distribution per block position

The context's keys and values depend on nothing but their own position, so a drafter keeps them
(`context_keys`) and a pass costs the block only. Slot k guesses its own token (DFlash), or, from
the anchor on, the one after it (`sample_from_anchor`, DSpark).

DSpark's additions: the Markov head adds W2 W1[x_{k-1}] to the logits of position k, or what a
recurrence makes of the whole draft so far: a token fits those before it although one pass made all
distributions; the confidence head says how likely token k is to be accepted, given the one before
it. Embedding and output layer are the target's unless a checkpoint has its own; `bind` sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from outrider.models.gguf.linear import BlockEmbedding
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_parts import BlockConvolution, CandidateSelector, MarkovHead
from outrider.models.tokens.vocabulary import OUTSIDE

INITIAL_STD = 0.02
# (layer, queries (B, heads, S, D), the block's own keys and values (B, KV heads, S, D)) -> (B,
# heads, S, D)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class BlockAttention(nn.Module):
    """Projections of one layer; the caller decides which positions see each other (`Attend`)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size = config.hidden_size
        dim = config.head_dim
        bias = config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(size, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, size, bias=bias)
        self.q_norm = nn.RMSNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def queries(self, states: Tensor) -> Tensor:
        """(B, S, H) -> (B, heads, S, D), not yet rotated."""
        return self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, H) -> keys, not yet rotated, and values (B, KV heads, S, D)."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return keys, self.v_proj(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class BlockMLP(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class BlockLayer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = BlockMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention_conv = BlockConvolution(config) if config.conv_taps else None
        self.mlp_conv = BlockConvolution(config) if config.conv_taps else None

    def mix(self, states: Tensor, attended: Callable[[Tensor], Tensor]) -> Tensor:
        """States (B, S, H) after the layer; `attended`: what attention makes of normed ones."""
        states = states + _around(self.attention_conv, attended, self.input_layernorm(states))
        return states + _around(self.mlp_conv, self.mlp, self.post_attention_layernorm(states))


def _around(
    conv: BlockConvolution | None, part: Callable[[Tensor], Tensor], states: Tensor
) -> Tensor:
    if conv is None:
        return part(states)
    states, kernels = conv.enter(states)
    return conv.leave(part(states), kernels)


class ConfidenceHead(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.proj = nn.Linear(width, 1)


class BlockHead(nn.Module):
    """The network of a block head: a few layers that guess a block of tokens in one pass.

    `token_ids` (draft vocabulary,): the target's id of every token the head knows; None: all.
    """

    token_ids: Tensor | None

    def __init__(self, config: BlockConfig, token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(len(config.target_layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, config.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, config.norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        num_tokens = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(size, num_tokens, bias=False) if config.own_output else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        self.register_buffer("token_ids", token_ids, persistent=False)
        # not a child: its tables stay fp32 whatever the head's dtype
        self.__dict__["_rotary"] = _rotary(config)
        self.__dict__["_target"] = None  # nor are the target's tables the head's to save

    @classmethod
    def new(cls, config: BlockConfig, target: Any) -> BlockHead:
        """An untrained head of a transformers module: random layers, a Markov head and a confidence
        that say nothing yet."""
        head = cls(config)
        for part in head.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=INITIAL_STD)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
        if head.markov_head is not None:
            nn.init.zeros_(head.markov_head.markov_w2.weight)
        if head.confidence_head is not None:
            nn.init.zeros_(head.confidence_head.proj.weight)
        head.bind(target.get_input_embeddings(), target.get_output_embeddings())
        return head.to(target.get_input_embeddings().weight.device)

    def bind(self, embedding: nn.Module, output: nn.Module) -> None:
        """Use the target's tables where the head has none of its own."""
        self.__dict__["_target"] = (embedding, output)

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_norm.weight.dtype  # a norm's: linears may be packed

    def tables(self) -> tuple[Any, Any]:
        """(embedding, output layer) in use: the head's own, or the target's. Bind a head without
        its own first."""
        modules = self.embed_tokens, self.lm_head
        if modules[0] is not None and modules[1] is not None:
            return modules
        target = self._bound()
        return modules[0] or target[0], modules[1] or target[1]

    @property
    def rotary(self) -> nn.Module:
        """Makes cosines and sines of positions."""
        return self.__dict__["_rotary"]

    def _bound(self) -> tuple[Any, Any]:
        target = self.__dict__["_target"]
        assert target is not None, "a head without tables of its own: bind() it to a target"
        return target

    def context(self, hidden: Sequence[Tensor]) -> Tensor:
        """The target's states (..., target H) of `target_layers`, in this order -> context (...,
        H)."""
        return self.hidden_norm(self.fc(torch.cat(list(hidden), dim=-1).to(self.dtype)))

    def context_keys(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Context (B, T, H) at positions (B, T) -> per layer its rotated keys and values (B, KV
        heads, T, D)."""
        return [self._keys_values(layer, context, positions) for layer in self.layers]

    def embed(self, tokens: Tensor) -> Tensor:
        """(...) -> (..., H). The table as it is: some models scale what they look up, a block head
        does so by its own flag."""
        table = self.embed_tokens if self.embed_tokens is not None else self._bound()[0]
        rows = (
            table.rows(tokens)
            if isinstance(table, BlockEmbedding)
            else F.embedding(tokens, table.weight)
        )
        return rows.to(self.dtype) * self.config.embedding_scale

    def block_tokens(self, anchors: Tensor) -> Tensor:
        """Anchor tokens (...) -> what a block is fed (..., block size): the anchor, then masks."""
        masks = anchors.new_full(
            (*anchors.shape, self.config.block_size - 1), self.config.mask_token_id
        )
        return torch.cat([anchors[..., None], masks], dim=-1)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Fed tokens (B, S) at positions (B, S) -> states (B, S, H) that the output layer reads."""
        states = self.embed(tokens)
        layer: Any
        for index, layer in enumerate(self.layers):
            states = layer.mix(
                states, partial(self._attended, index, layer.self_attn, positions, attend)
            )
        return self.norm(states)

    def _attended(
        self, index: int, attention: Any, positions: Tensor, attend: Attend, normed: Tensor
    ) -> Tensor:
        keys, values = attention.keys_values(normed)
        queries = self._rotate(attention.queries(normed), positions)
        return attention.o_proj(
            attend(index, queries, self._rotate(keys, positions), values).transpose(1, 2).flatten(2)
        )

    def guessing(self, states: Tensor) -> Tensor:
        """Block states (..., block size, H) -> those that guess (..., guesses, H), first guess
        first."""
        return states if self.config.sample_from_anchor else states[..., 1:, :]

    def logits(self, states: Tensor) -> Tensor:
        """States (..., H) -> logits (..., draft vocabulary), not yet corrected by what comes
        before."""
        logits = self._outputs(states) * self.config.logit_scale
        cap = self.config.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _outputs(self, states: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(states)
        table, output = self._bound()
        dtype = table.dtype if isinstance(table, BlockEmbedding) else table.weight.dtype
        # in training the head is fp32, whatever the target is
        return output(states.to(dtype)).to(states.dtype)

    @property
    def output_parameters(self) -> list[Tensor]:
        """The head's own tensors that `logits` and `corrected` read."""
        return [
            tensor
            for part in (self.lm_head, self.markov_head)
            if part is not None
            for tensor in part.parameters()
        ]

    def corrected(self, logits: Tensor, states: Tensor, before: Tensor) -> Tensor:
        """Logits (..., draft vocabulary) of positions with these states, after tokens `before`
        (...)."""
        if self.candidate_selector is not None:
            return self.candidate_selector(logits, states, before)
        return logits if self.markov_head is None else logits + self.markov_head(states, before)

    def remembering(
        self, logits: Tensor, states: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`corrected`, also by a recurrent Markov head, whose `memory` (..., rank) of earlier
        tokens goes in and comes out."""
        if self.markov_head is None or not self.config.markov_recurrent:
            return self.corrected(logits, states, before), None
        correction, memory = self.markov_head.step(states, before, memory)
        return logits + correction, memory

    def in_full(self, logits: Tensor) -> Tensor:
        """Logits over the draft vocabulary -> (..., V) over the target's."""
        if self.token_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), OUTSIDE)
        return full.index_copy(-1, self.token_ids, logits)

    def confidence_logits(self, states: Tensor, before: Tensor) -> Tensor:
        """(...): how sure the head is that the token at a position is accepted, given the token
        before it; not calibrated."""
        assert self.confidence_head is not None, "a head without confidence"
        if self.config.confidence_with_markov:
            assert self.markov_head is not None, (
                "a confidence with Markov features needs the Markov head"
            )
            states = torch.cat([states, self.markov_head.markov_w1(before)], dim=-1)
        return self.confidence_head.proj(states)[..., 0]

    def confidence(self, level: int, states: Tensor, before: Tensor) -> Tensor:
        """(..., n): the calibrated probability that each of the n guesses from this level on, whose
        states are (..., n, H), is accepted, given that those before it are. `before` (..., n): the
        token before each."""
        logits = self.confidence_logits(states, before).float()
        known = self.config.temperatures or (1.0,)
        temperatures = [
            known[min(each, len(known) - 1)] for each in range(level, level + logits.shape[-1])
        ]
        return torch.sigmoid(logits / torch.tensor(temperatures, device=logits.device))

    def _keys_values(self, layer: Any, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = layer.self_attn.keys_values(states)
        return self._rotate(keys, positions), values

    def _rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """(B, heads, S, D) at positions (B, S)."""
        rotary: Any = self.rotary
        if rotary.inv_freq.device != states.device:
            rotary.to(states.device)
        cos, sin = rotary(states, positions)
        return apply_rotary_pos_emb(states, states, cos, sin)[0]


def _rotary(config: BlockConfig) -> nn.Module:
    return Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            num_hidden_layers=1,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rope),
        )
    )
