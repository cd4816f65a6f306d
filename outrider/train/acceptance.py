"""Kind `acceptance`: a head that stops drafting. It predicts the acceptance of the next token from
a draft model's distribution.

The draft model (`draft`) and the target are frozen and read the same texts, written by the target:
the contexts in which drafts are accepted. Labels are analytic: sum min(p, q) before a draw, min(1,
p / q) of a token drawn, and for greedy rows whether both likeliest tokens agree. A share of
positions is treated as the first of a draft.

The draft does not change, so validation measures what stopping by the head gains (`stopping.py`).
The best checkpoint has the largest expected tau for as many draft tokens as the fixed length
`fixed`. Reported alongside it, sampled and greedy: the share of draft tokens saved at that length's
tau, what a perfect head would save, and the head's calibration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.models.heads.acceptance import LEAST, AcceptanceConfig, AcceptanceHead, DraftPositions
from outrider.models.loading.load import load_config, load_module, load_tokenizer
from outrider.models.source import resolve
from outrider.models.tokens.vocabulary import check_same_vocabulary, fit_width
from outrider.settings import checked, setting
from outrider.train.losses import acceptance, softmax_fp32
from outrider.train.recipe import FeatureBatch, LossReport, RecipeSetup
from outrider.train.stopping import chains, saving

OWNER = "kind 'acceptance'"


@checked()
@dataclass(frozen=True)
class AcceptanceTraining:
    """For which draft model, how large."""

    draft: str = setting(
        "", "the draft model whose distributions the head reads: a folder or hub id"
    )
    hidden_size: int = setting(32, "width of the head", at_least=1)
    num_layers: int = setting(2, "residual layers of the head", at_least=0)
    token_size: int = setting(
        16,
        "numbers learnt for every token of the vocabulary; 0: the head looks at probabilities "
        "alone",
        at_least=0,
    )
    first_share: float = setting(
        0.2, "positions treated as the first of a draft", at_least=0, at_most=1
    )
    fixed: int = setting(5, "fixed draft length that validation compares with", at_least=1)
    depth: int = setting(16, "longest draft in validation")

    def __post_init__(self) -> None:
        if self.fixed >= self.depth:
            raise ConfigError(
                f"{OWNER}: fixed must be below depth, got fixed={self.fixed}, depth={self.depth}"
            )


class AcceptanceRecipe:
    """Trains a head that predicts acceptance; satisfies `recipe.Recipe`."""

    Settings: ClassVar[type] = AcceptanceTraining
    drafter: ClassVar[str] = "draft-model stop=acceptance acceptance_head={folder}"
    uses_draft: ClassVar[bool] = False
    default_lr: ClassVar[float | None] = 3e-3
    signals: tuple[int, ...] = ()

    def __init__(self, head: AcceptanceHead, draft: Any, settings: AcceptanceTraining) -> None:
        """`draft`: a transformers module, frozen; it is no part of `module`."""
        self.module: nn.Module = head
        self.head = head
        self._draft = draft
        self._settings = settings

    @classmethod
    def build(cls, setup: RecipeSetup) -> AcceptanceRecipe:
        settings: AcceptanceTraining = setup.settings
        if not settings.draft:
            raise ConfigError(
                f"{OWNER} needs the draft model that it will stop: draft=FOLDER_OR_HUB_ID"
            )
        source = resolve(settings.draft)
        config = load_config(source)
        if setup.tokenizer is not None:
            check_same_vocabulary(
                setup.tokenizer, load_tokenizer(source), setup.name, settings.draft
            )
        device = setup.target.device
        dtype = setup.target.dtype
        draft: Any = load_module(source, config, dtype, device)
        width = draft.get_output_embeddings().weight.shape[0]
        shape = AcceptanceConfig(
            settings.hidden_size,
            settings.num_layers,
            settings.token_size,
            width if settings.token_size else 0,
            setup.name,
            settings.draft,
        )
        if setup.init is None:
            return cls(AcceptanceHead(shape).to(device), draft, settings)
        head = AcceptanceHead.load(setup.init, width).train().requires_grad_(True).to(device)
        for name in ("hidden_size", "num_layers", "token_size"):
            if getattr(head.config, name) != getattr(shape, name):
                raise ConfigError(
                    f"{OWNER}: --init {setup.init} has {name}={getattr(head.config, name)}; this "
                    f"run wants {getattr(shape, name)}"
                )
        head.config = shape
        return cls(head, draft, settings)

    def loss(self, batch: FeatureBatch) -> LossReport:
        seen = self.read(batch)
        count = len(seen.sampled)
        first = (
            torch.rand(count).to(seen.sampled.device) < self._settings.first_share
        ) | seen.draft_positions.first
        logits, labels = self.examples(seen, first)
        loss = F.binary_cross_entropy_with_logits(logits, labels) if count else logits.sum()
        if self.head.training:
            return LossReport(
                loss, [], {"acceptance": float(labels.mean()) if count else 0.0}, [], max(count, 1)
            )
        return self._judged(loss, seen, batch)

    @torch.no_grad()
    def _judged(self, loss: Tensor, seen: Counted, batch: FeatureBatch) -> LossReport:
        """The effect on these texts of drafts that stop by the head, sampled ones and greedy
        ones."""
        longest = int(batch.mask.sum(dim=1).max())
        fixed = self._settings.fixed
        depth = min(self._settings.depth, longest)
        parts: dict[str, float] = {}
        survivals = []
        num = 0
        for name, label, accepted, greedy in (
            ("sampled", seen.sampled, seen.kept, False),
            ("greedy", seen.agree, seen.agree, True),
        ):
            estimates = chains(*self._estimates(seen, batch, greedy=greedy), batch.mask, depth)
            true = _spread(label, batch)
            after = _spread(accepted, batch)
            real = chains((true, true), (after, after), batch.mask, depth)
            if depth <= fixed or len(real) == 0:  # texts too short to tell
                continue
            report = saving(estimates, real, fixed)
            num = len(real)
            survivals.append(report.survival)
            values = {
                "saved": report.saved,
                "possible": report.possible,
                "calibration": report.calibration,
                "fixed_tau": report.fixed_tau,
                "tau": report.tau,
                "acceptance": float(label.mean()),
            }
            parts |= {f"{part}_{name}": value for part, value in values.items()}
        survival = [sum(both) / len(survivals) for both in zip(*survivals, strict=True)]
        return LossReport(loss, [], parts, survival, num)

    def _estimates(
        self, seen: Counted, batch: FeatureBatch, *, greedy: bool
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The head's estimates (B, T), of the first token of a draft and of later ones: before the
        draw, then after it."""
        flag = torch.full_like(seen.draft_positions.first, greedy)

        def estimates(drawn: Tensor | None, is_first: bool) -> Tensor:
            positions = replace(seen.draft_positions, first=torch.full_like(flag, is_first))
            return _spread(torch.sigmoid(self.head(positions, flag, drawn)), batch)

        drawn = seen.best if greedy else seen.drawn
        return (estimates(None, True), estimates(None, False)), (
            estimates(drawn, True),
            estimates(drawn, False),
        )

    def examples(self, seen: Counted, first: Tensor) -> tuple[Tensor, Tensor]:
        """(logits (4 N,), labels (4 N,)): each position to a sampled row, then to a greedy one,
        before the draw, then after it. `first`: (N,) bool."""
        cases: list[tuple[bool, Tensor | None, Tensor]] = [
            (False, None, seen.sampled),
            (True, None, seen.agree),
        ]
        cases += [(False, seen.drawn, seen.kept), (True, seen.best, seen.agree)]
        positions = replace(seen.draft_positions, first=first)
        logits = [
            self.head(positions, torch.full_like(first, greedy), drawn)
            for greedy, drawn, _ in cases
        ]
        return torch.cat(logits), torch.cat([label for *_, label in cases])

    @torch.no_grad()
    def read(self, batch: FeatureBatch) -> Counted:
        """The distributions of draft and target at every position that counts."""
        logits = self._draft(
            input_ids=batch.tokens, attention_mask=batch.valid.long(), use_cache=False
        ).logits
        draft_logits = fit_width(logits[batch.mask].float(), batch.logits.shape[-1])  # (N, V)
        wanted = batch.logits[batch.mask]
        rows, columns = batch.mask.nonzero(as_tuple=True)
        earlier = softmax_fp32(logits[rows, (columns - 1).clamp(min=0)])
        # of a padded vocabulary, the draft may have less
        previous = batch.tokens[rows, columns].clamp(max=earlier.shape[-1] - 1)
        before = earlier.gather(1, previous[:, None])[:, 0]
        draft_probs = softmax_fp32(draft_logits)
        true = softmax_fp32(wanted)
        best = draft_logits.argmax(-1)
        drawn = draft_probs.multinomial(1) if len(draft_probs) else best[:, None]
        chances = draft_probs.gather(1, drawn)
        chance = (true.gather(1, drawn) / chances.clamp(min=LEAST)).clamp(max=1)[:, 0]
        agree = (best == wanted.argmax(-1)).float()
        positions = DraftPositions.of(draft_probs, previous, before, columns == 0)
        return Counted(positions, acceptance(true, draft_logits), agree, drawn[:, 0], chance, best)

    def save(self, folder: Path) -> None:
        self.head.save(folder)


@dataclass(frozen=True)
class Counted:
    """The N positions of a batch that count."""

    draft_positions: DraftPositions  # first: there is no token before
    sampled: Tensor  # (N,) sum min(p, q)
    agree: Tensor  # (N,) whether both likeliest tokens are the same, 0 or 1
    drawn: Tensor  # (N,) int64: a token drawn from the draft's distribution
    kept: Tensor  # (N,) min(1, p / q) of that token
    best: Tensor  # (N,) int64: the draft's likeliest token


def _spread(values: Tensor, batch: FeatureBatch) -> Tensor:
    """(N,) at the positions that count -> (B, T), 0 elsewhere."""
    spread = torch.zeros(batch.mask.shape, dtype=values.dtype, device=values.device)
    spread[batch.mask] = values
    return spread
