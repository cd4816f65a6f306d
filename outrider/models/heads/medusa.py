"""Medusa heads: each guesses one of the next tokens from one hidden state of the target (Cai et al. 2401.10774).

    feature f_t: what the target's output head reads at position t, whose distribution is that of x_{t+1}
    head i:      distribution of x_{t+2+i}, i = 0, 1, ...   =   softmax(W_i (f + SiLU(B f + b)))

Every head has its own residual blocks. The output layer is the head's own (V x H numbers each, as published) or the target's
for all heads (`own_output=False`), which is free where V is large. The vocabulary may be reduced: then `token_ids` says which
of the target's tokens a head knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.derived.derive import weight_of
from outrider.models.tokens.vocabulary import OUTSIDE


@dataclass(frozen=True)
class MedusaConfig:
    """Shapes of the heads, and what they know about themselves."""

    hidden_size: int
    vocab_size: int  # the target's
    num_heads: int
    num_layers: int = 1  # residual blocks of each head
    bias: bool = True  # in the residual blocks
    own_output: bool = True  # each head has its own output layer
    draft_vocab_size: int | None = None  # tokens a head knows; None: all
    logit_scale: float = 1.0
    trained_for: str = ""  # name of the target
    accuracies: tuple[tuple[float, ...], ...] = ()  # [head][rank]: how often its rank-th guess was right; () = not measured


class ResidualHead(nn.Module):
    """The residual blocks of one head, and its output layer where it has one of its own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=config.bias) for _ in range(config.num_layers))
        num_tokens = config.draft_vocab_size or config.vocab_size
        self.output = nn.Linear(size, num_tokens, bias=False) if config.own_output else None

    def forward(self, features: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        for layer in self.layers:
            features = features + F.silu(layer(features))
        return features


class MedusaHeads(nn.Module):
    """All heads. Without own output layers, `bind` must give them the target's before the first pass.

    `run`: in place of the modules' own passes; features (N, H) -> logits (N, heads, draft vocabulary).
    """

    run: Callable[[Tensor], Tensor] | None = None
    token_ids: Tensor | None  # (draft vocabulary,) int64: the target's id of every token the heads know; None: all
    _like: Tensor

    def __init__(self, config: MedusaConfig, token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(ResidualHead(config) for _ in range(config.num_heads))
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("_like", torch.empty(0), persistent=False)  # of the heads' dtype, even when linears are packed
        self.__dict__["_target_output"] = None  # not a child: the target's weights are not the head's to save

    @classmethod
    def new(cls, config: MedusaConfig, target: Any) -> MedusaHeads:
        """Untrained heads of a transformers module: blocks that change nothing, output layers that are copies of its own. So
        every head begins with the target's distribution of the token before the one it should guess."""
        made = cls(config)
        weight = target.get_output_embeddings().weight
        with torch.no_grad():
            for head in made.parts:
                for layer in head.layers:
                    nn.init.zeros_(layer.weight)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
                if head.output is not None:
                    head.output.weight.copy_(weight)
        made.bind(target.get_output_embeddings())
        return made.to(weight.device)

    def bind(self, output: nn.Module) -> None:
        """Read logits through the target's output layer, where the heads have none of their own."""
        if not self.config.own_output:
            self.__dict__["_target_output"] = output

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def target_output(self) -> nn.Module | None:
        """The target's output layer, where the heads have none of their own and are bound."""
        return self.__dict__["_target_output"]

    @property
    def parts(self) -> list[Any]:
        """The heads, as what they are."""
        return list(self.heads)

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    def output_weight(self, head: int) -> Tensor:
        """(V, H): of one head's output layer, its own or the target's."""
        own = self.parts[head].output
        return weight_of(self.__dict__["_target_output"] if own is None else own)

    def forward(self, features: Tensor, num_heads: int | None = None) -> Tensor:
        """Features (..., H) -> logits (..., heads, V), of all heads or of the first few."""
        own = features.to(self.dtype)  # in training the heads are fp32, whatever the target is
        if self.run is not None:
            logits = self.run(own.reshape(-1, own.shape[-1])).unflatten(0, own.shape[:-1])[..., :num_heads, :]
        else:
            logits = torch.stack([self._logits(head, own, features.dtype) for head in self.parts[:num_heads]], dim=-2)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.token_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), OUTSIDE)
        return full.index_copy(-1, self.token_ids, logits)

    def _logits(self, head: Any, features: Tensor, target_dtype: torch.dtype) -> Tensor:
        if head.output is not None:
            return head.output(head(features))
        output = self.__dict__["_target_output"]
        assert output is not None, "heads without output layers: bind() them to a target"
        return output(head(features).to(target_dtype)).to(features.dtype)
