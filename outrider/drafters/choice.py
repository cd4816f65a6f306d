"""How a drafter that samples picks its tokens, in a batch whose rows may be verified by different
rules.

    rows of a coupled verifier    the winner of the target's own noise: placed, not drawn, and likely the target's choice
    all others                    drawn with the row's own coin from the distribution that travels along as `Draft.probs`
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.rows import Rows
from outrider.sampling.rng import Purpose, gumbel_choice
from outrider.types import Draft


def choose(probs: Tensor, rows: Rows, start: Tensor, node: int) -> Tensor:
    """One token per row (B,) from `probs` (B, V), for node `node` of chains whose first token has
    text index `start` (B,)."""
    if rows.coupled:
        return gumbel_choice(probs, rows.rng.gumbel(start[:, None] + node, probs.shape[-1])[:, 0])
    tokens = rows.rng.categorical(probs, Purpose.DRAFT, start, node)
    if rows.coupled_rows is not None:
        coupled = rows.coupled_rows.nonzero()[:, 0]
        noise = rows.rng.select(coupled.tolist()).gumbel(
            start[coupled, None] + node, probs.shape[-1]
        )[:, 0]
        tokens[coupled] = gumbel_choice(probs[coupled], noise)
    return tokens


def chosen_chain(
    tokens: list[Tensor], node_probs: list[Tensor], lengths: Tensor, rows: Rows
) -> Draft:
    """The draft of N tokens (B,) chosen one after another from N distributions (B, V) by `choose`."""
    chosen = torch.stack(tokens, dim=1)
    if rows.coupled:
        return Draft(chosen, lengths)
    # nothing is drawn after the last node
    probs = torch.stack([*node_probs, torch.zeros_like(node_probs[0])], dim=1)
    drawn = None if rows.coupled_rows is None else ~rows.coupled_rows[:, None].expand_as(chosen)
    return Draft(chosen, lengths, probs=probs, sampled=drawn)
