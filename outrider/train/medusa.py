"""Kind `medusa`: heads on the target's last hidden state, the target frozen (Medusa-1, Cai et al.
2401.10774).

    feature f_t            of position t: known already; gives x_{t+1}, the token pending when the heads draft
    head i guesses x_{t+2+i}, so it is trained against logits[t + 1 + i], the target's whole distribution of that token

Head i counts 0.8^i: a late guess only matters when the earlier ones were right. After training the
accuracy of every head's first, second, ... guess is measured on held-out texts; the tree 'medusa'
is planned with these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads, load_medusa, save_medusa
from outrider.models.signals import AFTER_NORM, Listening
from outrider.settings import checked, setting
from outrider.train.expected import chain_means
from outrider.train.losses import acceptance, parse_loss, softmax_fp32, weighted_mean
from outrider.train.recipe import FeatureBatch, LossReport, RecipeSetup

OWNER = "kind 'medusa'"
NUM_RANKS = 8  # guesses of each head whose accuracy is measured


@checked()
@dataclass(frozen=True)
class MedusaTraining:
    """How many heads, how large."""

    num_heads: int = setting(4, "tokens guessed beyond the pending one", at_least=1)
    num_layers: int = setting(1, "residual blocks of each head", at_least=1)
    own_output: bool = setting(
        False, "an output layer for each head (V x H, as published) instead of the target's for all"
    )
    loss: str = setting(
        "kl", "losses.py: kl, reverse_kl, jsd, tv, ce, nla, lk_hybrid, or a sum like 0.1*ce+0.9*tv"
    )
    head_decay: float = setting(
        0.8, "weight of a head's loss against the one before it", above=0, at_most=1
    )

    def __post_init__(self) -> None:
        parse_loss(self.loss)


class MedusaRecipe:
    """Trains Medusa heads; satisfies `recipe.Recipe` and `recipe.Calibrates`."""

    Settings: ClassVar[type] = MedusaTraining
    drafter: ClassVar[str] = "medusa head={folder}"
    uses_draft: ClassVar[bool] = False
    default_lr: ClassVar[float | None] = 1e-3

    def __init__(
        self, heads: MedusaHeads, settings: MedusaTraining, dtype: torch.dtype | None = None
    ) -> None:
        """`heads`: bound to the target. `dtype`: of what is saved; None: as it is trained."""
        self.module: nn.Module = heads
        self.signals: tuple[int, ...] = (AFTER_NORM,)
        self.heads = heads
        self._settings = settings
        self._dtype = dtype
        self._loss = parse_loss(settings.loss)

    @classmethod
    def build(cls, setup: RecipeSetup) -> MedusaRecipe:
        settings: MedusaTraining = setup.settings
        Listening(setup.target, (AFTER_NORM,))  # refuses a target without that state
        output = setup.target.get_output_embeddings()
        vocab_size, hidden_size = output.weight.shape
        config = MedusaConfig(
            hidden_size,
            vocab_size,
            settings.num_heads,
            settings.num_layers,
            own_output=settings.own_output,
            trained_for=setup.name,
        )
        if setup.init is None:
            return cls(MedusaHeads.new(config, setup.target), settings, setup.saved_dtype)
        heads = (
            load_medusa(setup.init, hidden_size, vocab_size)
            .train()
            .requires_grad_(True)
            .to(output.weight.device)
        )
        actual = (heads.config.num_heads, heads.config.num_layers, heads.config.own_output)
        if (
            actual != (config.num_heads, config.num_layers, config.own_output)
            or heads.token_ids is not None
        ):
            raise ConfigError(
                f"{OWNER}: --init {setup.init} has num_heads={actual[0]}, num_layers={actual[1]}, "
                f"own_output={actual[2]}; this run "
                f"wants {config.num_heads}, {config.num_layers}, {config.own_output} and the "
                "whole vocabulary"
            )
        heads.bind(output)
        heads.config = replace(heads.config, trained_for=setup.name, accuracies=())
        return cls(heads, settings, setup.saved_dtype)

    def loss(self, batch: FeatureBatch) -> LossReport:
        # (N,) rows, (N,) positions; (N, heads)
        starts, counts = chain_starts(batch.mask, self.heads.num_heads)
        rows, positions = starts
        logits = self.heads(batch.hidden[AFTER_NORM][rows, positions])  # (N, heads, V)
        losses = []
        accepted = []
        parts = {}
        for head in range(self.heads.num_heads):
            target_probs = softmax_fp32(batch.logits[rows, self._answer(positions, head, batch)])
            losses.append(weighted_mean(self._loss(target_probs, logits[:, head]), counts[:, head]))
            accepted.append(acceptance(target_probs, logits[:, head]).detach())
            parts[f"loss@{head}"] = float(losses[-1].detach())
        weights = [self._settings.head_decay**head for head in range(len(losses))]
        loss = torch.stack(
            [weight * value for weight, value in zip(weights, losses, strict=True)]
        ).sum() / sum(weights)
        per_position, survival, count = chain_means(accepted, counts.unbind(1))
        return LossReport(loss, per_position, parts, survival, max(count, 1))

    def calibrate(self, batches: Iterable[FeatureBatch]) -> dict[str, float]:
        """Measure how often the guesses of each rank equal the text."""
        ranks = min(NUM_RANKS, self.heads.config.vocab_size)
        right = torch.zeros(self.heads.num_heads, ranks)
        tried = torch.zeros(self.heads.num_heads, 1)
        for batch in batches:
            (rows, positions), counts = chain_starts(batch.mask, self.heads.num_heads)
            # (N, heads, ranks)
            guesses = (
                self.heads(batch.hidden[AFTER_NORM][rows, positions]).topk(ranks, dim=-1).indices
            )
            for head in range(self.heads.num_heads):
                actual = batch.tokens[
                    rows, (positions + head + 2).clamp(max=batch.tokens.shape[1] - 1)
                ]
                hits = (guesses[:, head] == actual[:, None]) & counts[:, head, None]
                right[head] += hits.sum(dim=0).cpu()
                tried[head] += counts[:, head].sum().cpu()
        accuracies = (right / tried.clamp(min=1)).tolist()
        self.heads.config = replace(
            self.heads.config,
            accuracies=tuple(tuple(round(v, 4) for v in line) for line in accuracies),
        )
        return {f"accuracy@{head}": line[0] for head, line in enumerate(accuracies)}

    def save(self, folder: Path) -> None:
        save_medusa(self.heads, folder, self._dtype)

    @staticmethod
    def _answer(positions: Tensor, head: int, batch: FeatureBatch) -> Tensor:
        """Index of the target's logits that head `head` should predict."""
        return (positions + 1 + head).clamp(max=batch.logits.shape[1] - 1)


def chain_starts(mask: Tensor, depth: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Features from which a first guess counts: ((N,) rows, (N,) positions t, with mask[t + 1]),
    and (N, depth) bool: which of the guesses count, all those before included."""
    rows, positions = mask[:, 1:].nonzero(as_tuple=True)
    answers = positions[:, None] + 1 + torch.arange(depth, device=mask.device)  # (N, depth)
    inside = answers < mask.shape[1]
    counts = inside & mask[rows[:, None], answers.clamp(max=mask.shape[1] - 1)]
    return (rows, positions), counts.cumprod(dim=1).bool()
