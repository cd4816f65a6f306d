"""Kind `early-exit`: what the target's head needs to read the stream entering layer E: a scale and
a low-rank correction.

The target stays as it is; features are its own stream at layer E, so one target pass trains any
exit. The head is loaded by `--drafter "early-exit head=FOLDER"`. Simpler than LayerSkip
(2404.16710), which trains the layers themselves and thereby changes the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError, ConfigError
from outrider.models.heads.exit import ExitConfig, ExitHead
from outrider.models.signals import AFTER_NORM, Listening, decoder_layers
from outrider.settings import checked, setting
from outrider.train.expected import chain_windows
from outrider.train.losses import acceptance, parse_loss, softmax_fp32
from outrider.train.recipe import FeatureBatch, LossReport, RecipeSetup

OWNER = "kind 'early-exit'"
CLOSE = 1e-2  # relative; bfloat16 norms and heads round differently on one token and on many


@checked()
@dataclass(frozen=True)
class EarlyExitTraining:
    """Which exit, how large a correction."""

    exit_layer: int = setting(
        0, "the draft is the first E layers; 0: a third of the target's, at least 1", at_least=0
    )
    rank: int = setting(64, "of the correction", at_least=1)
    loss: str = setting(
        "lk_hybrid",
        "losses.py: kl, reverse_kl, jsd, tv, ce, nla, lk_hybrid, or a sum like 0.1*ce+0.9*tv",
    )
    depth: int = setting(
        5, "draft tokens per step that the expected tau is computed for", at_least=1
    )

    def __post_init__(self) -> None:
        parse_loss(self.loss)


class EarlyExitRecipe:
    """Trains the correction of an exit layer; satisfies `recipe.Recipe`."""

    Settings: ClassVar[type] = EarlyExitTraining
    drafter: ClassVar[str] = "early-exit head={folder}"
    uses_draft: ClassVar[bool] = False
    default_lr: ClassVar[float | None] = 2e-3

    def __init__(
        self, head: ExitHead, norm: nn.Module, output: nn.Module, settings: EarlyExitTraining
    ) -> None:
        """`norm` and `output`: the target's, frozen; they are not part of `module`."""
        self.module: nn.Module = head
        self.signals: tuple[int, ...] = (head.config.exit_layer,)
        self._head = head
        self._norm = norm
        self._output = output
        self._settings = settings
        self._loss = parse_loss(settings.loss)

    @classmethod
    def build(cls, setup: RecipeSetup) -> EarlyExitRecipe:
        settings: EarlyExitTraining = setup.settings
        count = len(decoder_layers(setup.target))
        hidden = setup.target.config.get_text_config().hidden_size
        exit_layer = settings.exit_layer or max(1, count // 3)
        if exit_layer >= count:
            raise ConfigError(
                f"{OWNER}: exit_layer must be below the target's {count} layers, got {exit_layer}"
            )
        config = ExitConfig(hidden, exit_layer, count, settings.rank, setup.name)
        head = ExitHead(config) if setup.init is None else _going_on(setup.init, config)
        norm = final_norm(setup.target)
        return cls(head, norm, setup.target.get_output_embeddings(), settings)

    def loss(self, batch: FeatureBatch) -> LossReport:
        mask = batch.mask
        states = batch.hidden[self._head.config.exit_layer][mask]  # (positions, H)
        wanted = softmax_fp32(batch.logits[mask])
        guessed = self._output(self._head(self._norm(states)))
        loss = self._loss(wanted, guessed).mean()
        accept = torch.zeros(mask.shape, device=loss.device)
        accept[mask] = acceptance(wanted, guessed).detach()
        per_position, survival, count = chain_windows(accept, mask, self._settings.depth)
        return LossReport(
            loss,
            per_position,
            {"acceptance": float(accept.sum() / mask.sum())},
            survival,
            max(count, 1),
        )

    def save(self, folder: Path) -> None:
        self._head.save(folder)


def _going_on(folder: Path, wanted: ExitConfig) -> ExitHead:
    head = ExitHead.load(folder).train().requires_grad_(True)
    actual = (
        head.config.hidden_size,
        head.config.num_layers,
        head.config.exit_layer,
        head.config.rank,
    )
    if actual != (wanted.hidden_size, wanted.num_layers, wanted.exit_layer, wanted.rank):
        raise ConfigError(
            f"{OWNER}: --init {folder} is for width {actual[0]}, {actual[1]} layers, exit {actual[2]}, "
            f"rank {actual[3]}; this run wants "
            f"{wanted.hidden_size}, {wanted.num_layers}, {wanted.exit_layer}, {wanted.rank}"
        )
    return head


@torch.no_grad()
def final_norm(target: Any) -> nn.Module:
    """The module between the last layer and the output head. Raises CapabilityError where the
    head's input is made otherwise, or where logits are more than the head's output (capped,
    scaled): what would be trained there is not what drafts."""
    states: dict[int, Tensor] = {}
    count = len(decoder_layers(target))
    # not 0: a padding token may have an embedding of zeros
    tokens = torch.arange(1, 5, device=target.device)[None]
    with Listening(target, (count, AFTER_NORM)).during(states):
        logits = target(input_ids=tokens, use_cache=False).logits
    head_sees = states[AFTER_NORM]
    output = target.get_output_embeddings()
    # it comes last, and untrained norms are all alike
    for part in reversed(list(target.base_model.modules())):
        weights = list(part.parameters(recurse=False))
        if (
            not any(True for _ in part.children())
            and weights
            and all(w.dim() == 1 for w in weights)
        ):
            normed = (
                part(states[count]) if weights[0].shape[-1] == states[count].shape[-1] else None
            )
            if normed is not None and _close(normed, head_sees) and _close(output(normed), logits):
                return part
    raise CapabilityError(
        f"{OWNER}: the logits of {target.config.model_type} are not its output head after a "
        "final norm of the last layer; "
        "train another kind of drafter for it"
    )


def _close(logits: Tensor, other: Tensor) -> bool:
    scale = float(other.float().abs().max())
    return (
        logits.shape == other.shape
        and float((logits.float() - other.float()).abs().max()) <= CLOSE * scale
    )
