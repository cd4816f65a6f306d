"""The shapes and flags of a block head (`block.py`), and what its tokens see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.models.pass_plan import QUERY_BLOCK


class Sight(NamedTuple):
    """The positions that tokens of a block see in one layer."""

    window: int  # positions looked back, its own counts as one; 0: all
    causal: bool  # inside the block


@dataclass(frozen=True)
class BlockConfig:
    """Shapes and flags of a block head."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the target's
    block_size: int  # slots of a block, the anchor's included
    target_hidden_size: int
    # keys of models/signals.py: whose residual streams make the context
    target_layers: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    sample_from_anchor: bool = True  # slot k guesses the token after it, the anchor's slot included
    causal: bool = False  # inside the block
    window: int = 0  # of `window_layers`: positions looked back, its own counts as one
    window_layers: tuple[int, ...] = ()
    causal_windows: bool = False  # inside the block, of `window_layers`
    norm_eps: float = 1e-6
    rope: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_positions: int = 40960
    attention_bias: bool = False
    qk_norm: bool = True
    markov_rank: int = 0  # 0: no Markov head
    markov_gated: bool = False
    markov_recurrent: bool = False
    conv_taps: int = 0  # of DFlash2's convolutions; 0: none
    conv_group_size: int = 0  # channels that share what a token adds to the kernels
    selector_rank: int = 0  # 0: no candidate selector
    selector_top_k: int = 0
    confidence: bool = False
    confidence_with_markov: bool = True
    draft_vocab_size: int | None = None  # tokens the head knows; None: all
    own_embedding: bool = False
    own_output: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None  # of the logits
    # of the confidence logits by position, from calibration; () = 1
    temperatures: tuple[float, ...] = ()
    trained_for: str = ""

    @property
    def num_guesses(self) -> int:
        """Tokens one pass guesses."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def sight(self, layer: int) -> Sight:
        """The attention pattern of a layer."""
        slides = layer in self.window_layers
        return Sight(self.window if slides else 0, self.causal or (slides and self.causal_windows))

    def mask(self, sight: Sight, context: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
        """The additive attention mask of blocks after `context` (B,) positions of a cache, as
        `models/attention.py` wants it.

        Its shape is (B, 1, block size rounded up to QUERY_BLOCK, num_keys).
        """
        positions = torch.arange(num_keys, device=context.device)
        queries = torch.arange(
            -(-self.block_size // QUERY_BLOCK) * QUERY_BLOCK, device=context.device
        )
        seen = (
            (queries + 1).clamp(max=self.block_size)
            if sight.causal
            else torch.full_like(queries, self.block_size)
        )
        # what padding queries compute is never read
        allowed = positions < (context[:, None] + seen)[..., None]
        if sight.window:
            own = queries.clamp(max=self.block_size - 1)
            allowed &= positions > (context[:, None] + own)[..., None] - sight.window
        return torch.zeros(allowed.shape, dtype=dtype, device=context.device).masked_fill(
            ~allowed, float("-inf")
        )[:, None]
