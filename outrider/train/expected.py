"""Expected emitted tokens from expected acceptances: what validation reports, and best checkpoints
are chosen by.

At a position a draft token from q is accepted with probability a = sum_x min(p, q) (Leviathan et
al. 2211.17192, theorem 3.5). Along a chain the chance that the first j are all accepted is the
product of the first j; tau = 1 + the sum of these products. The acceptances are measured on texts
of the target, not on the draft's own tokens: an estimate, like all teacher forcing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.train.recipe import LossReport


def chain_windows(accept: Tensor, mask: Tensor, depth: int) -> tuple[list[float], list[float], int]:
    """Expected chains of a drafter whose distribution at each position is known: every position
    starts a chain over the text that follows it.

    `accept` (B, T): sum min(p, q) at each position; `mask` (B, T) bool: positions that count.
    Returns what `chain_means` does.
    """
    shifts = range(min(depth, mask.shape[1]))
    steps, inside = ([F.pad(values[:, j:], (0, j)) for j in shifts] for values in (accept, mask))
    return chain_means(steps, list(accumulate(inside, torch.logical_and)))


def chain_means(
    steps: Sequence[Tensor], counts: Sequence[Tensor]
) -> tuple[list[float], list[float], int]:
    """Mean acceptance of chains with an acceptance for each step: all of one shape, a chain an
    element. `counts[j]` (bool) says which chains continue to step j; none does that has ended before.

    Returns (per_position, survival, number of chains), of chains that continue to the end, so that all
    depths are means over the same ones. Where texts are too short for any, the end is the deepest
    step of some. An acceptance at j is weighted by the chance that j is reached, as in serving, so
    that products of `per_position` are `survival`.
    """
    depth = 0
    num = 0
    for each in counts:
        if there := int(each.sum()):
            depth = depth + 1
            num = there
    if depth == 0:
        return [], [], 0
    chosen = torch.stack([accept[counts[depth - 1]].float() for accept in steps[:depth]])
    survival = chosen.cumprod(dim=0).double().mean(dim=1).tolist()
    before = [1.0, *survival[:-1]]
    return (
        [now / then if then > 0 else 0.0 for now, then in zip(survival, before, strict=True)],
        survival,
        num,
    )


@dataclass
class Expectation:
    """Sums over batches of one validation."""

    count: int = 0
    loss: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    survival: list[float] = field(default_factory=list)

    def add(self, report: LossReport) -> None:
        """A batch, weighted by its positions. Means of survivals that a batch is too short for
        count as missing chains."""
        survival = report.survival or _products(report.per_position)
        self.count += report.count
        self.loss += report.count * float(report.loss.detach())
        for name, value in report.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + report.count * value
        self.survival += [0.0] * (len(survival) - len(self.survival))
        for index, value in enumerate(survival):
            self.survival[index] += report.count * value

    def mean_survival(self) -> list[float]:
        """[j]: chance that the first j + 1 draft tokens are all accepted."""
        return [value / max(self.count, 1) for value in self.survival]

    def mean_loss(self) -> float:
        return self.loss / max(self.count, 1)

    def mean_parts(self) -> dict[str, float]:
        return {name: value / max(self.count, 1) for name, value in self.parts.items()}

    def tau(self) -> float:
        """Expected tokens per target pass, the correction or bonus token included."""
        return 1.0 + sum(self.mean_survival())

    def per_position(self) -> list[float]:
        """[j]: acceptance at draft position j, given that it is reached."""
        survival = self.mean_survival()
        before = [1.0, *survival[:-1]]
        return [now / then if then > 0 else 0.0 for now, then in zip(survival, before, strict=True)]


def _products(values: Sequence[float]) -> list[float]:
    products = []
    product = 1.0
    for value in values:
        product *= value
        products.append(product)
    return products
