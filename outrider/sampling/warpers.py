"""Temperature, top-k, top-p and min-p, in this order, with the results of transformers'
`LogitsWarper`s.

Every function masks (-inf) or scales, row by row, and leaves a row whose option is off untouched to
the last bit, so a row's law never depends on who shares its batch. Top-p has a plain version (full
sort, the reference) and a fast one that looks at the likeliest tokens only and falls back to the
plain one for the nodes it cannot decide; a test compares them.

Drafts are filtered by `draft_filters.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from outrider.sampling.draft_filters import above_floor
from outrider.sampling.params import SamplingParams

NUCLEUS_HEAD = (
    # tokens the fast top-p looks at; constant, so that a row's result never depends on its
    # neighbours
    256
)


@dataclass(frozen=True)
class Warpers:
    """The options of S sampled rows; None where no row uses an option."""

    temperature: Tensor | None  # (S, 1, 1) fp64
    top_k: Tensor | None  # (S, 1, 1) int64, 0 = off
    max_top_k: int
    top_p: Tensor | None  # (S, 1, 1) fp64, 1 = off
    min_p: Tensor | None  # (S, 1, 1) fp64, 0 = off

    @classmethod
    def of(
        cls, params: list[SamplingParams], vocab_size: int, device: torch.device | str
    ) -> Warpers:
        def column(values: list, off: float) -> Tensor | None:
            if all(value == off for value in values):
                return None
            dtype = torch.int64 if isinstance(off, int) else torch.float64
            return torch.tensor(values, dtype=dtype, device=device)[:, None, None]

        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else 0 for p in params]
        return cls(
            temperature=column([p.temperature for p in params], 1.0),
            top_k=column(top_k, 0),
            max_top_k=max(top_k, default=0),
            top_p=column([p.top_p for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
        )

    def draft_law(self, scores: Tensor) -> Tensor:
        """`law` for drafts: filtered by `draft_filters.above_floor`."""
        if self.temperature is not None:
            scores = scores / self.temperature.to(scores.dtype)
        return (scores if self.filters is None else above_floor(scores, *self.filters)).softmax(
            dim=-1
        )

    @cached_property
    def filters(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """The rows that filter (F,) int64, and their top-k int64, top-p and min-p fp64, (F,) each;
        None where no row does."""
        some = [option for option in (self.top_k, self.top_p, self.min_p) if option is not None]
        if not some:
            return None
        off = torch.zeros(len(some[0]), device=some[0].device)
        top_k = off.long() if self.top_k is None else self.top_k[:, 0, 0]
        top_p = off.double() + 1 if self.top_p is None else self.top_p[:, 0, 0]
        min_p = off.double() if self.min_p is None else self.min_p[:, 0, 0]
        rows = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero()[:, 0]
        return rows, top_k[rows], top_p[rows], min_p[rows]

    def law(self, scores: Tensor) -> Tensor:
        """softmax of the filtered scores: (S, M, V) -> (S, M, V), same dtype; NaN rows where scores
        are no numbers.
        """
        if self.temperature is not None:
            scores = scores / self.temperature.to(scores.dtype)
        if self.top_k is not None:
            scores = apply_top_k(scores, self.top_k, self.max_top_k)
        if self.top_p is not None:
            scores = apply_top_p(scores, self.top_p.to(scores.dtype))
        if self.min_p is not None:
            scores = apply_min_p(scores, self.min_p.to(scores.dtype))
        return scores.softmax(dim=-1)


def apply_top_k(scores: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Mask what is below the k-th largest score; everything equal to it stays, as in transformers."""
    largest = scores.topk(max_top_k, dim=-1).values  # (S, M, max_top_k), descending
    index = (top_k - 1).clamp(min=0).expand(-1, scores.shape[1], -1)
    threshold = largest.gather(-1, index)  # (S, M, 1)
    return scores.masked_fill((scores < threshold) & (top_k > 0), -torch.inf)


def apply_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Mask tokens less likely than `min_p` times the likeliest."""
    probs = scores.softmax(dim=-1)
    return scores.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)


def apply_top_p(scores: Tensor, top_p: Tensor, head: int = NUCLEUS_HEAD) -> Tensor:
    """Mask everything outside the smallest set of likeliest tokens whose mass reaches `top_p`; fast
    version.

    A token goes when the mass ranked before it is at least top_p. Within the `head` largest scores
    that decides a node when some token of the head goes and no tie straddles the edge; other nodes
    are sorted in full.
    """
    if scores.shape[-1] <= head:
        return apply_top_p_by_sorting(scores, top_p)
    largest = scores.topk(head, dim=-1).values  # (S, M, head), descending
    probs = (largest - scores.logsumexp(dim=-1, keepdim=True)).exp()
    before = probs.cumsum(dim=-1) - probs
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)  # (S, M, 1)
    edge = largest.gather(-1, num_kept - 1)
    beyond = largest.gather(-1, num_kept.clamp(max=head - 1))
    is_on = top_p < 1
    masked = scores.masked_fill((scores < edge) & is_on, -torch.inf)
    undecided = is_on & (
        (num_kept == head) | (edge == beyond)
    )  # NaN compares false: stays NaN, reported later
    if undecided.any():  # sync: the rare full sort
        row, output, _ = undecided.nonzero(as_tuple=True)
        masked[row, output] = apply_top_p_by_sorting(scores[row, output][:, None], top_p[row])[:, 0]
    return masked


def apply_top_p_by_sorting(scores: Tensor, top_p: Tensor) -> Tensor:
    """The reference of `apply_top_p`: drop from the least likely up while the dropped mass is at
    most 1 - top_p.

    Among equals at the edge the lowest ids stay (transformers leaves that to an unstable sort).
    """
    descending, order = scores.sort(dim=-1, descending=True, stable=True)
    # own mass included
    mass_from_below = descending.flip(-1).softmax(dim=-1).cumsum(dim=-1).flip(-1)
    remove = mass_from_below <= 1 - top_p
    remove[..., 0] = False
    remove = torch.zeros_like(remove).scatter_(-1, order, remove)
    return scores.masked_fill(remove & (top_p < 1), -torch.inf)
