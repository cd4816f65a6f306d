"""A recipe of our own for comparison: a draft model that learns the text alone, and never sees the
target's distribution.

It is `draft-model` in everything but its loss, and joins `outrider train` as any third party's
recipe would: by an entry point in the group `outrider.recipes`, here of a package that consists of
its metadata only.
"""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F

from outrider.train.draft_model import DraftModelRecipe
from outrider.train.recipe import FeatureBatch, LossReport

KIND = "hard-labels"
ENTRY_POINTS = f"[outrider.recipes]\n{KIND} = study.hard_labels:HardLabelRecipe\n"


class HardLabelRecipe(DraftModelRecipe):
    """`DraftModelRecipe` with the cross entropy of the text's own tokens; validation still asks for
    acceptance by the target."""

    def loss(self, batch: FeatureBatch) -> LossReport:
        if not self.module.training:
            return super().loss(batch)
        logits = self.module(
            input_ids=batch.tokens, attention_mask=batch.valid.long(), use_cache=False
        ).logits
        labels = batch.tokens.roll(-1, dims=1)[batch.mask]  # x_{t+1} where logits[t] count
        loss = F.cross_entropy(logits[batch.mask].float(), labels)
        return LossReport(loss, [], count=len(labels))


def installed(folder: Path) -> Path:
    """Metadata of a package that registers the recipe; `folder` then belongs on PYTHONPATH, beside
    `benchmarks`."""
    metadata = folder / "outrider_hard_labels-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: outrider-hard-labels\nVersion: 1\n", encoding="utf-8"
    )
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return folder
