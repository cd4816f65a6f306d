"""Expected emitted tokens from expected acceptances: what validation reports, and best checkpoints are chosen by.

At a position a draft token from q is accepted with probability a = sum_x min(p, q) (Leviathan et al. 2211.17192, theorem 3.5).
Along a chain the chance that the first j are all accepted is the product of the first j; tau = 1 + the sum of these products.
The acceptances are measured on texts of the target, not on the draft's own tokens: an estimate, like all teacher forcing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.train.recipe import LossReport


def chain_windows(accept: Tensor, mask: Tensor, depth: int) -> tuple[list[float], list[float], int]:
    """Expected chains of a drafter whose distribution at each position is known: every position starts a chain over the text that
    follows it.

    `accept` (B, T): sum min(p, q) at each position; `mask` (B, T) bool: positions that count. Returns (per_position,
    survival, number of chains): chains that fit into the mask as a whole, so that all depths are means over the same
    chains. Texts shorter than `depth` give shorter chains: depth is cut to what at least one text allows.
    """
    zero = torch.zeros((), device=accept.device)
    values = torch.where(mask, accept.float(), zero)
    longest = int(mask.sum(dim=1).max()) if mask.numel() else 0
    depth = min(depth, longest)
    if depth == 0:
        return [], [], 0
    length = mask.shape[1] - depth + 1
    shifted = [values[:, j : j + length] for j in range(depth)]
    whole = torch.stack([mask[:, j : j + length] for j in range(depth)]).all(dim=0)
    return chain_means(shifted, whole)


def chain_means(steps: Sequence[Tensor], counts: Tensor) -> tuple[list[float], list[float], int]:
    """Mean acceptance of chains with an acceptance for each step: `steps[j]` and `counts` (bool) have one shape, a chain an
    element.

    Returns (per_position, survival, number of chains). An acceptance at j is weighted by the chance that j is reached, as
    in serving, so that products of `per_position` are `survival`.
    """
    num = int(counts.sum())
    if num == 0:
        return [], [], 0
    reached = torch.ones_like(steps[0], dtype=torch.float32)
    survival = []
    for accept in steps:
        reached = reached * torch.where(counts, accept.float(), torch.zeros((), device=accept.device))
        survival.append(float(reached[counts].double().mean()))
    before = [1.0, *survival[:-1]]
    return [now / then if then > 0 else 0.0 for now, then in zip(survival, before, strict=True)], survival, num


@dataclass
class Expectation:
    """Sums over batches of one validation."""

    count: int = 0
    loss: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    survival: list[float] = field(default_factory=list)

    def add(self, report: LossReport) -> None:
        """A batch, weighted by its positions. Means of survivals that a batch is too short for count as missing chains."""
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
    found, product = [], 1.0
    for value in values:
        product *= value
        found.append(product)
    return found
