"""The effect of a stop rule: tokens drafted at equal tau, and tau at equal tokens drafted, against
a fixed length.

A draft may begin at every position of a text. Along it, S_j is the true chance that the first j
draft tokens are all accepted, those before the j-th being drawn, and c_j what a head makes of it. A
rule drafts on while c_j is above a threshold, so over all positions it submits the n tokens with
the highest min(c_1 .. c_j), for some n, and

    tau = 1 + sum of S over the n submitted tokens / positions          drafted = n / positions

A fixed length k submits the first k of every position. `saved` is the share of its tokens that the
rule does without at its tau; `possible` is that share for a head that knew S itself: more than that
no head can save, whatever it reads.

The chances are those along the target's own text (teacher forcing), as everywhere in validation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.train.calibration import expected_calibration_error


@dataclass(frozen=True)
class Saving:
    """The savings of one head against one fixed length."""

    # [j]: chance that token j + 1 is submitted and accepted, as many submitted as by the fixed
    # length
    survival: list[float]
    fixed_tau: float
    saved: float  # share of the fixed length's tokens, at its tau
    possible: float  # the same for the true chances
    calibration: float  # expected error of c_j against S_j

    @property
    def tau(self) -> float:
        """Tokens per pass, with as many tokens drafted as by the fixed length."""
        return 1.0 + sum(self.survival)


def chains(
    before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], mask: Tensor, depth: int
) -> Tensor:
    """(N, depth): chances along the drafts that fit whole into `mask` (B, T) bool, one for each
    position; the j-th is the product of those of the tokens drawn and of the next one.

    (of the first token of a draft, of a later one), (B, T) each: `before` the draw of the token at
    that position, `after` it.
    """
    length = mask.shape[1] - depth + 1
    whole = torch.stack([mask[:, j : j + length] for j in range(depth)]).all(dim=0)

    def steps(values: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack([values[j > 0][:, j : j + length][whole] for j in range(depth)], dim=1)

    drawn = steps(after).cumprod(dim=1)
    before_it = torch.cat([torch.ones_like(drawn[:, :1]), drawn[:, :-1]], dim=1)
    return before_it * steps(before)


def saving(estimated: Tensor, true: Tensor, fixed: int) -> Saving:
    """`estimated` and `true` (N, depth): c and S, N at least 1; `fixed`: the length compared with,
    at most depth."""
    estimated = estimated.double()
    true = true.double()
    positions = len(true)
    order = _lowest(estimated).flatten().argsort(descending=True, stable=True)
    submitted = torch.zeros_like(order, dtype=torch.bool)
    submitted[order[: fixed * positions]] = True
    survival = (true * submitted.view_as(true)).mean(dim=0).tolist()
    wanted = float(true[:, :fixed].sum())
    return Saving(
        survival,
        1.0 + wanted / positions,
        _saved(estimated, true, fixed, wanted),
        _saved(true, true, fixed, wanted),
        expected_calibration_error(estimated.flatten(), true.flatten()),
    )


def _lowest(estimated: Tensor) -> Tensor:
    """The lowest so far along each draft: what has stopped does not begin again."""
    return estimated.cummin(dim=1).values


def _saved(estimated: Tensor, true: Tensor, fixed: int, wanted: float) -> float:
    """Share of the fixed length's tokens that are not needed when they are submitted in the order
    of `estimated`."""
    order = _lowest(estimated).flatten().argsort(descending=True, stable=True)
    gained = true.flatten()[order].cumsum(dim=0)
    needed = int((gained < wanted * (1 - 1e-9)).sum()) + 1 if wanted > 0 else 0
    return 1.0 - needed / (fixed * len(true))
