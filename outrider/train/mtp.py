"""Kind `mtp`: a multi-token-prediction head for a target that has none, or the target's own, tuned
on its answers.

A new head is one more decoder layer of the target's kind: it begins as a copy of the target's last
layer with full attention, and its projection hands the target's state on. Where the target's
checkpoint has a head, or `--init` names one, training continues from it, in its layout. Trained as it
drafts: `unrolled.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from outrider.errors import CapabilityError
from outrider.models.families import MTP_TRAINED
from outrider.models.heads.mtp import MtpConfig, MtpHead, MtpLayer
from outrider.models.heads.mtp_body import copied_body
from outrider.models.heads.mtp_files import load_mtp, save_mtp, ships_mtp
from outrider.models.indexer import indexer_layers
from outrider.models.signals import Listening
from outrider.models.source import resolve
from outrider.settings import checked, setting
from outrider.train.losses import parse_loss
from outrider.train.recipe import RecipeSetup
from outrider.train.unrolled import UnrolledRecipe


@checked()
@dataclass(frozen=True)
class MtpTraining:
    """An MTP head."""

    unrolls: int = setting(3, "drafting steps that are trained", at_least=1)
    loss: str = setting(
        "lk_hybrid",
        "losses.py: kl, reverse_kl, jsd, tv, ce, nla, lk_hybrid, or a sum like 0.1*ce+0.9*tv",
    )
    step_decay: float = setting(
        0.8, "weight of a drafting step against the one before it", above=0, at_most=1
    )

    def __post_init__(self) -> None:
        parse_loss(self.loss)


class MtpRecipe(UnrolledRecipe):
    """Trains an MTP head; satisfies `recipe.Recipe`."""

    Settings: ClassVar[type] = MtpTraining
    drafter: ClassVar[str] = "mtp head={folder}"
    uses_draft: ClassVar[bool] = False
    default_lr: ClassVar[float | None] = 5e-4

    def __init__(
        self, head: MtpHead, settings: Any, dtype: torch.dtype | None = None, num_layers: int = 0
    ) -> None:
        """`num_layers`: of the target, which count in the names of some layouts."""
        super().__init__(head, settings, dtype)
        self._mtp = head
        self._num_layers = num_layers

    @classmethod
    def build(cls, setup: RecipeSetup) -> MtpRecipe:
        target = setup.target
        text = setup.target.config.get_text_config()
        there = (
            str(setup.init)
            if setup.init is not None
            else setup.name
            if ships_mtp(setup.name)
            else None
        )
        table = target.get_input_embeddings()
        device = table.weight.device
        if there is None:
            head = _new_head(target, device)
        else:
            head = load_mtp(resolve(there), target.config, torch.float32, device, blocks_stay=False)
        if len(head.layers) > 1:
            raise CapabilityError(
                f"kind 'mtp': the head in '{there}' has {len(head.layers)} layers; heads of one "
                "are tuned"
            )
        if indexer_layers(head):
            what = "the head's attention is sparse: an indexer picks the keys of each token"
            raise CapabilityError(f"kind 'mtp': {what}; heads that see all tokens are trained")
        if head.window is not None:
            raise CapabilityError(
                f"kind 'mtp': the head's layer sees {head.window} tokens; those that see all are "
                "trained"
            )
        Listening(target, head.config.signals)  # refuses a target without these states
        head.config = replace(head.config, trained_for=setup.name)
        head.bind(table, target.get_output_embeddings())
        return cls(
            head.train().requires_grad_(True),
            setup.settings,
            setup.saved_dtype,
            text.num_hidden_layers,
        )

    def save(self, folder: Path) -> None:
        save_mtp(self._mtp, folder, self._num_layers, self._dtype)


def _new_head(target: Any, device: torch.device) -> MtpHead:
    size = target.config.get_text_config().hidden_size
    layer = MtpLayer(*copied_body("kind 'mtp'", target, device), size, bias=False)
    with torch.no_grad():
        layer.projection.weight.copy_(
            torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], dim=1)
        )
    return MtpHead(MtpConfig(MTP_TRAINED.name, size), [layer])
