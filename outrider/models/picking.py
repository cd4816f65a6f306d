"""How a recorded drafting loop picks its tokens: what `drafters/choice.py` does with the
distributions of `Warpers.draft_law`.

Every row takes its likeliest token but for those named: rows that draw, rows whose verifier shares
its noise, and which of them filter. Only they pay for it: in a batch of greedy rows nobody is
named, and all that remains of a pick is an argmax.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.sampling import rng
from outrider.sampling.draft_filters import above_floor


class Draws(NamedTuple):
    """The inputs for picking n tokens of each row: S of B rows are sampled; of these R draw from
    their distributions, C race with keyed noise (`gumbel`), and F filter. `drawn`, `racing` and
    `filtered` say which of the S.
    """

    sampled: Tensor  # (S,) int64: which rows
    temperature: Tensor  # (S,) fp32
    drawn: Tensor  # (R,) int64
    uniforms: Tensor  # (R, n) fp64
    racing: Tensor  # (C,) int64
    noise: Tensor  # (C, n, V) fp64, Gumbel noise of their next text positions
    filtered: Tensor  # (F,) int64
    top_k: Tensor  # (F,) int64, 0 = off
    top_p: Tensor  # (F,) fp64, 1 = off
    min_p: Tensor  # (F,) fp64, 0 = off

    def of(self, nodes: slice) -> Draws:
        """The draws of these tokens, each tensor contiguous: programs read their inputs by the
        strides of the example."""
        if not len(self.sampled):
            return no_draws(nodes.stop - nodes.start, self.noise.shape[-1], self.noise.device)
        return self._replace(
            uniforms=self.uniforms[:, nodes].contiguous(), noise=self.noise[:, nodes].contiguous()
        )


@lru_cache(maxsize=64)
def no_draws(num_tokens: int, vocab_size: int, device: torch.device) -> Draws:
    """The draws of a batch of greedy rows. Kept: they are asked for at every step, and nobody
    writes to them."""
    nobody = torch.empty(0, dtype=torch.int64, device=device)
    nothing = torch.empty(0, device=device)
    uniforms = torch.empty(0, num_tokens, dtype=torch.float64, device=device)
    noise = uniforms[..., None].expand(-1, -1, vocab_size)
    return Draws(
        nobody,
        nothing,
        nobody,
        uniforms,
        nobody,
        noise,
        nobody,
        nobody,
        nothing.double(),
        nothing.double(),
    )


def pick(
    logits: Tensor, draws: Draws, node: int, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row's token (B,) number `node` from logits (B, V), and the distributions (R, V) fp32 of
    the rows that draw.

    `ids` (V,): where a head has a vocabulary of its own, its tokens in the vocabulary of the noise.
    """
    node_draws = draws._replace(
        uniforms=draws.uniforms[:, node, None], noise=draws.noise[:, node, None]
    )
    tokens, probs = pick_all(logits[:, None], node_draws, ids)
    return tokens[:, 0], probs[:, 0]


def pick_all(logits: Tensor, draws: Draws, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Picks n tokens a row that do not depend on each other: logits (B, n, V) -> tokens (B, n),
    distributions (R, n, V)."""
    sampled = draws.sampled
    drawn = draws.drawn
    racing = draws.racing
    scores = _scores(logits.index_select(0, sampled), draws)
    probs = torch.softmax(scores.index_select(0, drawn), dim=-1)
    noise = draws.noise if ids is None else draws.noise.index_select(-1, ids)
    winners = (scores.index_select(0, racing) + noise).argmax(dim=-1)
    tokens = logits.argmax(dim=-1).index_copy(
        0, sampled.index_select(0, drawn), inverse_cdf(probs, draws.uniforms)
    )
    return tokens.index_copy(0, sampled.index_select(0, racing), winners), probs


def _scores(logits: Tensor, draws: Draws) -> Tensor:
    """Logits (S, n, V) as the rows' options have them: fp32, unlikely tokens of rows that filter
    masked."""
    scores = logits.float() / draws.temperature[:, None, None]
    return above_floor(scores, draws.filtered, draws.top_k, draws.top_p, draws.min_p)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative mass, summed in fp64, exceeds uniform * total.

    This is `sampling.rng.inverse_cdf` in operations that fuse.
    """
    if probs.device.type != "cpu":
        return rng.inverse_cdf(probs, uniforms)
    cumulative = probs.double().cumsum(dim=-1)
    return (cumulative <= uniforms[..., None] * cumulative[..., -1:]).sum(dim=-1)
