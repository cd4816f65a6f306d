"""Heads that are fed the target's hidden states, trained as they draft (training-time test): `eagle.py`, `mtp.py`.

Unroll j of a text does, for every position t at once, what the j-th drafting step does with the features known up to t:

    reads      token x_{t+1+j} beside feature g_t (j = 0) or the state o_{j-1}[t] that the unroll before made
    sees       the pairs of unroll 0 at s <= t, and of every earlier unroll only its own, t (each query sees exactly its chain)
    guesses    x_{t+2+j}, whose target distribution is in logits[t + 1 + j]

The loss of unroll j counts step_decay^j. A reduced draft vocabulary holds the most frequent tokens of the training responses.
The target's distribution is cut to them and renormalised. Positions whose likeliest token is outside do not count in the loss,
but count as rejections in the report.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.eagle_unroll import unrolled
from outrider.models.heads.mtp import MtpHead
from outrider.train.chunked import chunk_size, judged_in_chunks
from outrider.train.expected import chain_means
from outrider.train.losses import (
    TINY,
    Loss,
    TargetDistributions,
    acceptance,
    parse_loss,
    target_distributions,
    weighted_mean,
)
from outrider.train.recipe import FeatureBatch, LossReport


class UnrolledRecipe:
    """What the kinds share: everything but which head it is and where it is saved."""

    def __init__(self, head: EagleHead | MtpHead, settings: Any, dtype: torch.dtype | None = None) -> None:
        """`head`: bound to the target. `dtype`: of what is saved; None: as it is trained."""
        self.module: nn.Module = head
        self.signals = head.config.signals
        self.head, self._settings, self._dtype = head, settings, dtype
        self._loss: Loss = parse_loss(settings.loss)

    def loss(self, batch: FeatureBatch) -> LossReport:
        settings, head = self._settings, self.head
        masks, states, rows, positions = [], [], [], []
        for step, found in enumerate(unrolled(head, batch.tokens, self._features(batch), settings.unrolls)):  # (B, T-1, H)
            masks.append(_ahead(batch.mask, step))
            row, position = masks[-1].nonzero(as_tuple=True)
            states.append(found[row, position])
            rows.append(row)
            positions.append(position + 1 + step)  # of the target's distribution
        device = batch.logits.device
        size = chunk_size(batch.logits.shape[-1], device)
        measured = not self.module.training
        targets = target_distributions(batch.logits, batch.mask, head.draft_ids, size, share=measured)  # for all steps
        number = batch.mask.flatten().cumsum(0).view(batch.mask.shape) - 1  # of a position's distribution
        numbers = [number[row, position] for row, position in zip(rows, positions, strict=True)]
        counts = [targets.counts[one] for one in numbers]
        decay = [settings.step_decay**step for step in range(len(counts))]
        weights = [share / sum(decay) * one / one.sum().clamp(min=TINY) for share, one in zip(decay, counts, strict=True)]
        every, sizes = torch.cat(numbers), [len(one) for one in numbers]

        def judge(logits: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
            return self._judge(targets.at(every[which]), logits)

        judged = judged_in_chunks(
            lambda part, which: head.logits(part), judge, torch.cat(states), torch.cat(weights), head.output_parameters,
            chunk_size(targets.probs.shape[-1], device),
        )  # fmt: skip
        total, parts, accepted = judged.total, {}, []
        losses, accepts = judged.losses.split(sizes), judged.accepted.split(sizes)
        for step, mask in enumerate(masks):
            distance = self._feature_loss(batch, rows[step], positions[step], states[step])
            total = total + distance * decay[step] / sum(decay)
            parts[f"loss@{step}"] = float(weighted_mean(losses[step], counts[step]) + distance.detach())
            accepted.append(torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, accepts[step]))
        if self.module.training:  # acceptances are measured in validation alone
            return LossReport(total, [], parts)
        per_position, survival, count = chain_means(accepted, masks)
        return LossReport(total, per_position, parts, survival, max(count, 1))

    def _features(self, batch: FeatureBatch) -> Tensor:
        """(B, T, H) that the head reads."""
        return self.head.features(batch.hidden)

    def _judge(self, target: TargetDistributions, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(loss (n,), acceptance (n,)) of draft logits (n, Vd) where the target's distribution is `target`."""
        return self._loss(target.probs, logits), self._acceptance(target, logits)

    def _acceptance(self, target: TargetDistributions, logits: Tensor) -> Tensor:
        """(n,), measured in validation; zeros while the head is trained, which saves a softmax over every logit."""
        if self.module.training:
            return logits.new_zeros(len(logits), dtype=torch.float32)
        return acceptance(target.whole, logits)

    def _feature_loss(self, batch: FeatureBatch, rows: Tensor, positions: Tensor, states: Tensor) -> Tensor:
        """The loss of states (n, H) of these rows and places as states: none, they are free to be whatever drafts best."""
        return states.new_zeros(())


def _ahead(mask: Tensor, step: int) -> Tensor:
    """(B, T-1) bool: [t] is whether logits[t + 1 + step] and all earlier logits of the chain from t count."""
    found = torch.ones_like(mask[:, 1:])
    for earlier in range(step + 1):
        later = mask[:, 1 + earlier :]
        found = found & torch.nn.functional.pad(later, (0, found.shape[1] - later.shape[1]))
    return found
