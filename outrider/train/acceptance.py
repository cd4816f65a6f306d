"""Kind `acceptance`: a head that predicts, from a draft model's law, how likely its next token is accepted, and stops drafting.

The draft model (`draft`) and the target are frozen and read the same texts, which the target said: the contexts that drafting
meets as long as its tokens are accepted. Labels are analytic, sum min(p, q), and for greedy rows whether both likeliest tokens
agree; each position is seen under both. A share of positions is treated as the first of a draft, where nothing came before.

There is no tau to validate by: the draft does not change. What is reported as acceptance at position 1 is one minus the mean
absolute error of the estimate, so that the best checkpoint is the one that estimates best.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.models.heads.acceptance import AcceptanceConfig, AcceptanceHead, law_features
from outrider.models.load import load_config, load_module, load_tokenizer
from outrider.models.vocabulary import check_same_vocabulary, fit_width
from outrider.settings import setting
from outrider.train.losses import acceptance, law_of
from outrider.train.recipe import FeatureBatch, LossReport, RecipeSetup

OWNER = "recipe 'acceptance'"


@dataclass(frozen=True)
class AcceptanceTraining:
    """For which draft model, how large."""

    draft: str = setting("", "the draft model whose laws are judged: a folder or hub id")
    hidden_size: int = setting(32, "width of the head")
    num_layers: int = setting(2, "residual layers of the head")
    first_share: float = setting(0.2, "positions treated as the first of a draft")

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.num_layers < 0:
            raise ConfigError(
                f"{OWNER}: hidden_size must be at least 1 and num_layers at least 0, got {self.hidden_size}, {self.num_layers}"
            )
        if not 0 <= self.first_share <= 1:
            raise ConfigError(f"{OWNER}: first_share must be between 0 and 1, got {self.first_share}")


class AcceptanceRecipe:
    """See the module docstring; `recipe.Recipe`."""

    Settings: ClassVar[type] = AcceptanceTraining
    drafter: ClassVar[str] = "draft-model stop=acceptance acceptance_head={folder}"
    uses_draft: ClassVar[bool] = False
    default_lr: ClassVar[float | None] = 3e-3
    signals: tuple[int, ...] = ()

    def __init__(self, head: AcceptanceHead, draft: Any, settings: AcceptanceTraining) -> None:
        """`draft`: a transformers module, frozen; it is no part of `module`."""
        self.module: nn.Module = head
        self.head, self._draft, self._settings = head, draft, settings

    @classmethod
    def build(cls, setup: RecipeSetup) -> AcceptanceRecipe:
        settings: AcceptanceTraining = setup.settings
        if not settings.draft:
            raise ConfigError(f"{OWNER} needs the draft model that it will stop: draft=FOLDER_OR_HUB_ID")
        config = load_config(settings.draft)
        if setup.tokenizer is not None:
            check_same_vocabulary(setup.tokenizer, load_tokenizer(settings.draft), setup.name, settings.draft)
        device, dtype = setup.target.device, setup.target.dtype
        draft = load_module(settings.draft, config, dtype, device)
        shape = AcceptanceConfig(settings.hidden_size, settings.num_layers, setup.name, settings.draft)
        if setup.init is None:
            return cls(AcceptanceHead(shape).to(device), draft, settings)
        head = AcceptanceHead.load(setup.init).train().requires_grad_(True).to(device)
        if (head.config.hidden_size, head.config.num_layers) != (shape.hidden_size, shape.num_layers):
            raise ConfigError(
                f"{OWNER}: --init {setup.init} has hidden_size={head.config.hidden_size}, num_layers={head.config.num_layers}; "
                f"this run wants {shape.hidden_size}, {shape.num_layers}"
            )
        head.config = shape
        return cls(head, draft, settings)

    def loss(self, batch: FeatureBatch) -> LossReport:
        features, labels = self.examples(batch)
        logits = self.head(features)
        loss = F.binary_cross_entropy_with_logits(logits, labels) if len(labels) else logits.sum()
        error = float((torch.sigmoid(logits) - labels).abs().mean().detach()) if len(labels) else 0.0
        good = [1 - error] if len(labels) else []
        parts = {"error": error, "acceptance": float(labels.mean()) if len(labels) else 0.0}
        return LossReport(loss, good, parts, good, max(len(labels), 1))

    @torch.no_grad()
    def examples(self, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        """(features (2 N, F), labels (2 N,)): every position that counts, as a sampled row sees it and as a greedy one."""
        logits = self._draft(input_ids=batch.tokens, attention_mask=batch.valid.long(), use_cache=False).logits
        own = fit_width(logits[batch.mask].float(), batch.logits.shape[-1])  # (N, V)
        law, wanted = law_of(own), batch.logits[batch.mask]
        rows, places = batch.mask.nonzero(as_tuple=True)
        earlier = law_of(logits[rows, (places - 1).clamp(min=0)])
        tokens = batch.tokens[rows, places].clamp(max=earlier.shape[-1] - 1)  # of a padded vocabulary, the draft may have less
        before = earlier.gather(1, tokens[:, None])[:, 0]
        first = (torch.rand(len(rows)).to(before.device) < self._settings.first_share) | (places == 0)
        sampled, greedy = (torch.full_like(first, flag) for flag in (False, True))
        features = torch.cat([law_features(law, before, first, flag) for flag in (sampled, greedy)])
        agree = (own.argmax(-1) == wanted.argmax(-1)).float()
        return features, torch.cat([acceptance(law_of(wanted), own), agree])

    def save(self, folder: Path) -> None:
        self.head.save(folder)
