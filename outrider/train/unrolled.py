"""Heads that are fed the target's hidden states, trained as they draft (training-time test):
`eagle.py`, `mtp.py`.

Unroll j of a text does, for every position t at once, what the j-th drafting step does with the
features known up to t:

    reads      token x_{t+1+j} alongside feature g_t (j = 0) or the state o_{j-1}[t] that the unroll before made
    sees       the pairs of unroll 0 at s <= t, and of every earlier unroll only its own, t (each query sees exactly its chain)
               in `unrolled`, keys of unroll 2 at t = 3:   K0[0..3]   K1[3]   K2[3]   at positions 0..3, 4, 5
    guesses    x_{t+2+j}, whose target distribution is in logits[t + 1 + j]

The loss of unroll j counts step_decay^j. A reduced draft vocabulary holds the most frequent tokens
of the training responses. The target's distribution is cut to them and renormalised. Positions
whose likeliest token is outside do not count in the loss, but count as rejections in the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.heads.eagle import EagleHead
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
    """The base of the kinds: all but which head it is and where it is saved."""

    def __init__(
        self, head: EagleHead | MtpHead, settings: Any, dtype: torch.dtype | None = None
    ) -> None:
        """`head`: bound to the target. `dtype`: of what is saved; None: as it is trained."""
        self.module: nn.Module = head
        self.signals = head.config.signals
        self.head = head
        self._settings = settings
        self._dtype = dtype
        self._loss: Loss = parse_loss(settings.loss)

    def loss(self, batch: FeatureBatch) -> LossReport:
        settings = self._settings
        head = self.head
        masks = []
        states = []
        rows = []
        positions = []
        # (B, T-1, H)
        for step, found in enumerate(
            unrolled(head, batch.tokens, self._features(batch), settings.unrolls)
        ):
            masks.append(_ahead(batch.mask, step))
            row, position = masks[-1].nonzero(as_tuple=True)
            states.append(found[row, position])
            rows.append(row)
            positions.append(position + 1 + step)  # of the target's distribution
        device = batch.logits.device
        size = chunk_size(batch.logits.shape[-1], device)
        measured = not self.module.training
        # for all steps
        targets = target_distributions(
            batch.logits, batch.mask, head.draft_ids, size, share=measured
        )
        # of a position's distribution
        number = batch.mask.flatten().cumsum(0).view(batch.mask.shape) - 1
        numbers = [number[row, position] for row, position in zip(rows, positions, strict=True)]
        counts = [targets.counts[number] for number in numbers]
        decay = [settings.step_decay**step for step in range(len(counts))]
        weights = [
            share / sum(decay) * one / one.sum().clamp(min=TINY)
            for share, one in zip(decay, counts, strict=True)
        ]
        every = torch.cat(numbers)
        sizes = [len(number) for number in numbers]

        def judge(logits: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
            return self._judge(targets.at(every[which]), logits)

        judged = judged_in_chunks(
            lambda part, which: head.logits(part),
            judge,
            torch.cat(states),
            torch.cat(weights),
            head.output_parameters,
            chunk_size(targets.probs.shape[-1], device),
        )
        total = judged.total
        parts = {}
        accepted = []
        losses = judged.losses.split(sizes)
        accepts = judged.accepted.split(sizes)
        for step, mask in enumerate(masks):
            distance = self._feature_loss(batch, rows[step], positions[step], states[step])
            total = total + distance * decay[step] / sum(decay)
            parts[f"loss@{step}"] = float(
                weighted_mean(losses[step], counts[step]) + distance.detach()
            )
            accepted.append(
                torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, accepts[step])
            )
        if self.module.training:  # acceptances are measured in validation alone
            return LossReport(total, [], parts)
        per_position, survival, count = chain_means(accepted, masks)
        return LossReport(total, per_position, parts, survival, max(count, 1))

    def _features(self, batch: FeatureBatch) -> Tensor:
        """(B, T, H) that the head reads."""
        return self.head.features(batch.hidden)

    def _judge(self, target: TargetDistributions, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(loss (n,), acceptance (n,)) of draft logits (n, Vd) where the target's distribution is
        `target`."""
        return self._loss(target.probs, logits), self._acceptance(target, logits)

    def _acceptance(self, target: TargetDistributions, logits: Tensor) -> Tensor:
        """(n,), measured in validation; zeros while the head is trained, which saves a softmax over
        every logit."""
        if self.module.training:
            return logits.new_zeros(len(logits), dtype=torch.float32)
        return acceptance(target.whole, logits)

    def _feature_loss(
        self, batch: FeatureBatch, rows: Tensor, positions: Tensor, states: Tensor
    ) -> Tensor:
        """The loss of states (n, H) of these rows and places as states: none, they are free to be
        whatever drafts best."""
        return states.new_zeros(())


def _ahead(mask: Tensor, step: int) -> Tensor:
    """(B, T-1) bool: [t] is whether logits[t + 1 + step] and all earlier logits of the chain from t
    count."""
    ahead = torch.ones_like(mask[:, 1:])
    for earlier in range(step + 1):
        later = mask[:, 1 + earlier :]
        ahead = ahead & F.pad(later, (0, ahead.shape[1] - later.shape[1]))
    return ahead


def unrolled(
    head: EagleHead | MtpHead, tokens: Tensor, features: Tensor, unrolls: int
) -> Iterator[Tensor]:
    """States (B, T-1, H) of every unroll: [t] of the j-th guesses x_{t+2+j}, having read x_{t+1} ..
    x_{t+1+j}.

    `tokens` (B, T) and `features` (B, T, H) of one text each. Where x_{t+1+j} does not exist,
    states mean nothing.
    """
    memory = _ChainMemory(len(head.layer_shapes))
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
    given = features[:, :-1]
    for step in range(unrolls):
        read = F.pad(tokens[:, 1 + step :], (0, min(step, positions.shape[1])))[
            :, : positions.shape[1]
        ]
        states = head(read, given, positions + step, memory.attend)
        yield states
        given = head.carry(states)


class _ChainMemory:
    """Keys and values of every layer: those of unroll 0, then one per position and unroll."""

    def __init__(self, num_layers: int) -> None:
        self._keys: list[list[Tensor]] = [[] for _ in range(num_layers)]  # each (B, heads, T, D)
        self._values: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None
    ) -> Tensor:
        """Attention of one unroll, whose keys and values join the memory. Softmax in fp32."""
        groups = query.shape[1] // key.shape[1]
        keys = self._keys[layer]
        values = self._values[layer]
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        if len(keys) == 1:
            return F.scaled_dot_product_attention(
                query, keys[0], values[0], is_causal=True, scale=scaling
            ).transpose(1, 2)
        length = query.shape[2]
        scores = query @ keys[0].transpose(2, 3)  # (B, heads, T, T)
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        own = [(query * chain).sum(-1, keepdim=True) for chain in keys[1:]]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = torch.cat([scores.masked_fill(future, float("-inf")), *own], dim=-1) * scale
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        out = weights[..., :length] @ values[0]
        for number, chain in enumerate(values[1:]):
            out = out + weights[..., length + number, None] * chain
        return out.transpose(1, 2)
