"""How a compiled drafting program picks its tokens: what `drafters/choice.py` does, for greedy rows and plain temperature.

Only the rows that draw pay for laws: `drawing` (R,) names them, and with R = 0, a batch of greedy rows, all that remains of a
pick is an argmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.sampling import rng

# How rows draw: the R of B rows that do (R,) int64, their temperatures (R,) fp32, their uniforms (R, n) fp64, one for each token.
# The others take the likeliest token; a greedy batch has R = 0.
Draws = tuple[Tensor, Tensor, Tensor]


def pick(logits: Tensor, drawing: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row (B,) from logits (B, V): the likeliest, or, for the rows `drawing` (R,), the one drawn at `uniforms`
    (R,) fp64 from softmax(logits / `temperature` (R,) fp32). And those rows' laws (R, V) fp32."""
    tokens, laws = pick_all(logits[:, None], drawing, temperature, uniforms[:, None])
    return tokens[:, 0], laws[:, 0]


def pick_all(logits: Tensor, drawing: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The same for n tokens a row that do not depend on each other: logits (B, n, V), uniforms (R, n) -> tokens (B, n), laws
    (R, n, V)."""
    best = logits.argmax(dim=-1)
    laws = torch.softmax(logits.index_select(0, drawing).float() / temperature[:, None, None], dim=-1)
    return best.index_copy(0, drawing, inverse_cdf(laws, uniforms)), laws


def inverse_cdf(law: Tensor, uniforms: Tensor) -> Tensor:
    """As `sampling.rng.inverse_cdf`, in operations that fuse: the first token whose cumulative mass, summed in fp64, exceeds
    uniform * total."""
    if law.device.type != "cpu":
        return rng.inverse_cdf(law, uniforms)
    cumulative = law.double().cumsum(dim=-1)
    return (cumulative <= uniforms[..., None] * cumulative[..., -1:]).sum(dim=-1)
