"""Mask tokens after a text, for draft models that guess several tokens in one pass (PARD,
2504.18583).

    at work    x_0 ... x_a m m m          the rows of x_a and of each mask guess x_{a+1}, x_{a+2}, ...
    training   x_0 ... x_{T-1} | m m | m m | ...      chains of masks after many anchors share one pass

Mask j of anchor a stands at position a + j, sees the text up to x_a and the masks of its own chain
before it, and learns the target's distribution of x_{a+1+j}. Anchors are drawn anew for every
batch: PARD keeps chains for a share of the positions, for the same reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.train.block import draw_anchors
from outrider.train.recipe import FeatureBatch

ANCHORS = 24  # of a text and batch
TOLERANCE = 1e-3  # of logits, between masks alone and alongside others


class MaskedText(NamedTuple):
    """The inputs of a model whose pass has the masks of several anchors after the text."""

    tokens: Tensor  # (B, T + A * n) int64
    positions: Tensor  # (B, T + A * n) int64
    visible: Tensor  # (B, 1, T + A * n, T + A * n) bool
    starts: Tensor  # (B, A) int64: the anchors
    counts: Tensor  # (B, A, 1 + n) bool: which guesses of an anchor and its masks count

    def logits(self, module: Any) -> Tensor:
        """(B, T + A * n, V) of every token."""
        dtype = next(module.parameters()).dtype
        hidden = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        hidden.masked_fill_(~self.visible, torch.finfo(dtype).min)
        logits: Tensor = module(
            input_ids=self.tokens,
            position_ids=self.positions,
            attention_mask=hidden,
            use_cache=False,
        ).logits
        return logits


def masked_text(batch: FeatureBatch, num_masks: int, mask_token: int) -> MaskedText:
    """A batch with the masks of anchors drawn at random, `num_masks` of each."""
    anchors = draw_anchors(batch.mask, ANCHORS, 1 + num_masks)
    return with_masks(batch.tokens, anchors.starts, anchors.counts, mask_token)


def with_masks(tokens: Tensor, starts: Tensor, counts: Tensor, mask_token: int) -> MaskedText:
    """Texts (B, T) with the masks of anchors at `starts` (B, A); `counts` (B, A, 1 + masks)."""
    num_rows, length = tokens.shape
    num_anchors = starts.shape[1]
    num_masks = counts.shape[2] - 1
    device = tokens.device
    text = torch.arange(length, device=device)
    offsets = torch.arange(1, num_masks + 1, device=device)
    masks = tokens.new_full((num_rows, num_anchors * num_masks), mask_token)
    places = (starts[..., None] + offsets).flatten(1)
    positions = torch.cat([text.expand(num_rows, -1), places], dim=1)
    known = torch.cat([text.expand(num_rows, -1), starts.repeat_interleave(num_masks, 1)], dim=1)
    sees_text = text <= known[..., None]  # (B, T + A * n, T)
    number = torch.arange(num_anchors * num_masks, device=device)
    chain = number // max(1, num_masks)
    same_chain = (chain[:, None] == chain) & (number <= number[:, None])
    sees_masks = torch.cat([same_chain.new_zeros(length, len(number)), same_chain])
    visible = torch.cat([sees_text, sees_masks.expand(num_rows, -1, -1)], dim=2)
    return MaskedText(torch.cat([tokens, masks], 1), positions, visible[:, None], starts, counts)


def check_masks(module: Any, mask_token: int, owner: str) -> None:
    """Check that masks of one anchor compute what they would alone.

    Raises CapabilityError where they do not, as where layers carry a state from token to token."""
    tokens = torch.arange(8, device=next(module.parameters()).device)[None]
    starts = tokens[:, [5, 2]]
    masked = with_masks(tokens, starts, tokens.new_ones(1, 2, 3).bool(), mask_token)
    alone = torch.cat([tokens[:, :3], tokens.new_full((1, 2), mask_token)], dim=1)
    try:
        with torch.no_grad():
            shared = masked.logits(module)[:, -2:]
            expected = module(input_ids=alone, use_cache=False).logits[:, -2:]
        fits = torch.allclose(shared, expected, atol=TOLERANCE, rtol=TOLERANCE)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        fits = False
    if not fits:
        raise CapabilityError(
            f"{owner}: a model of type '{module.config.model_type}' cannot read masks of several "
            "places in one pass, which parallel=... trains with; leave parallel out"
        )


def free_token(tokenizer: Any, token_counts: Tensor, vocab_size: int) -> int:
    """An id to use as the mask: the first that the tokenizer has no name for, else the rarest in
    the training responses, of equals the last."""
    named = set(tokenizer.get_vocab().values())
    unnamed = next((token for token in range(vocab_size) if token not in named), None)
    if unnamed is not None:
        return unnamed
    counts = token_counts[:vocab_size]
    return int((counts == counts.min()).nonzero()[-1])
