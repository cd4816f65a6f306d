"""The target without its last layers, or without some of its layers, as the draft: no second model,
no second cache.

The draft runs on the target's own weights (`models/derived/truncate.py`) and on its keys and values
(`self_speculation.py`).

Source: LayerSkip (Elhoushi et al. 2404.16710), whose models were trained for it; Draft & Verify
(Zhang et al. 2309.08168) for subsets of layers. A head trained for the exit (`outrider train
early-exit`, models/heads/exit.py) may stand before the target's output head; it brings its own exit
layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outrider.drafters.base import DraftSetup
from outrider.drafters.model.self_speculation import SelfDrafter, own_lm
from outrider.drafters.requirements import Requirements
from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.models.derived.derive import own_module, with_replaced
from outrider.models.derived.exit_search import find_exit
from outrider.models.derived.truncate import DecoderLayers
from outrider.models.heads.exit import ExitHead, ExitReader
from outrider.models.lm import LM
from outrider.models.loaded import ModelMemory
from outrider.models.loading.memory import head_memory
from outrider.settings import checked, setting

OWNER = "drafter 'early-exit'"


@checked()
@dataclass(frozen=True)
class EarlyExitSettings:
    """Which layers draft."""

    exit_layer: int | Literal["auto"] = setting(
        "auto", "draft with the first E layers; auto measures which E pays most"
    )
    skip_layers: str = setting(
        "", "instead of an exit: layers left out of the draft, counted from 0, like 3,4,7"
    )
    head: str = setting(
        "", "folder of a head trained for an exit ('outrider train early-exit'); it says which exit"
    )

    def __post_init__(self) -> None:
        if self.exit_layer != "auto" and self.exit_layer < 1:
            raise ConfigError(
                f"{OWNER}: exit_layer must be 'auto' or at least 1, got {self.exit_layer}"
            )
        if self.exit_layer != "auto" and self.skip_layers:
            raise ConfigError(f"{OWNER}: give exit_layer or skip_layers, not both")
        if self.head and self.skip_layers:
            raise ConfigError(f"{OWNER}: a trained head is for an exit; leave skip_layers out")
        numbers = self.skipped()
        if len(set(numbers)) < len(numbers):
            raise ConfigError(f"{OWNER}: skip_layers names a layer twice: '{self.skip_layers}'")

    def skipped(self) -> list[int]:
        """The layers of `skip_layers`. Raises ConfigError when it is no list of numbers."""
        words = [word.strip() for word in self.skip_layers.split(",")] if self.skip_layers else []
        if not all(word.isdecimal() for word in words):
            raise ConfigError(
                f"{OWNER}: skip_layers must be layer numbers like 3,4,7, got '{self.skip_layers}'"
            )
        return [int(word) for word in words]


class EarlyExitDrafter(SelfDrafter):
    """Chains from some of the target's layers."""

    needs = "nothing; best with a model trained for early exits"
    Settings = EarlyExitSettings

    def __init__(self, lm: LM, setup: DraftSetup, notes: list[str]) -> None:
        super().__init__(lm, setup.target.lm)
        self._notes = notes

    @property
    def notes(self) -> list[str]:
        return self._notes

    @classmethod
    def requirements(cls, settings: EarlyExitSettings) -> Requirements:
        return replace(
            super().requirements(settings), heads=((cls, settings.head),) if settings.head else ()
        )

    @classmethod
    def weigh_head(cls, head: str, target_config: Any, dtype: torch.dtype) -> ModelMemory:
        target = target_config.get_text_config()
        fitting = _fitting_head(
            head, target.num_hidden_layers, target.hidden_size, str(target_config._name_or_path)
        )
        return head_memory(head, fitting, 0, dtype)

    @classmethod
    def build(cls, setup: DraftSetup) -> EarlyExitDrafter:
        target = setup.target
        layers = DecoderLayers(own_module(target.module, "early-exit"), target.lm, target.label)
        head = _trained_head(setup, len(layers)) if setup.settings.head else None
        skipped, note = _choose_layers(setup, layers) if head is None else _layers_behind(head)
        module = layers.without(skipped)
        if head is not None:
            module = _reading(module, head, target.lm.device)
        notes = [note]
        lm = own_lm(
            module,
            target.lm,
            f"'{target.label}' without layers {', '.join(map(str, skipped))}",
            notes,
        )
        return cls(lm, setup, notes)


def _trained_head(setup: DraftSetup, count: int) -> ExitHead:
    """The head that was named. Raises CheckpointError when it was trained for another target,
    ConfigError for another exit."""
    head = _fitting_head(
        setup.settings.head, count, setup.target.card.hidden_size, setup.target.label
    )
    config = head.config
    if setup.settings.exit_layer not in ("auto", config.exit_layer):
        raise ConfigError(
            f"{OWNER}: '{setup.settings.head}' was trained for exit_layer {config.exit_layer}, "
            f"got {setup.settings.exit_layer}"
        )
    return head


def _fitting_head(folder: str, count: int, width: int, target: str) -> ExitHead:
    """The head in a folder. Raises CheckpointError when it was not trained for a target of `count`
    layers of this width."""
    head = ExitHead.load(Path(folder))
    config = head.config
    if (config.num_layers, config.hidden_size) != (count, width):
        raise CheckpointError(
            f"'{folder}' was trained for {config.target}: {config.num_layers} layers of width "
            f"{config.hidden_size}; "
            f"{target} has {count} of {width}"
        )
    return head


def _layers_behind(head: ExitHead) -> tuple[list[int], str]:
    config = head.config
    note = f"drafting with the first {config.exit_layer} of {config.num_layers} layers and a trained head of rank {config.rank}"
    return list(range(config.exit_layer, config.num_layers)), note


def _reading(module: Any, head: ExitHead, device: torch.device) -> nn.Module:
    """The module with the head before its output head."""
    output = module.get_output_embeddings()
    reader = ExitReader(head.to(device), output)
    return with_replaced(module, lambda part: reader if part is output else None)


def _choose_layers(setup: DraftSetup, layers: DecoderLayers) -> tuple[list[int], str]:
    """The layers to leave out, and a line about them. Raises ConfigError or CapabilityError when
    they do not exist."""
    settings = setup.settings
    count = len(layers)
    name = setup.target.label
    if count < 2:
        raise CapabilityError(
            f"{name} has {count} layer, so a draft cannot leave one out. Use another drafter."
        )
    if settings.skip_layers:
        skipped = sorted(settings.skipped())
        if skipped[-1] >= count or len(skipped) == count:
            raise ConfigError(
                f"{OWNER}: skip_layers must leave out some of layers 0..{count - 1} of {name}, "
                f"got '{settings.skip_layers}'"
            )
        return skipped, f"drafting without layers {', '.join(map(str, skipped))} of 0..{count - 1}"
    if settings.exit_layer == "auto":
        best = find_exit(layers, setup.target, setup.num_draft_tokens)
        return list(range(best.layer, count)), (
            f"drafting with the first {best.layer} of {count} layers: {best.acceptance:.0%} of greedy tokens right at "
            f"{best.cost:.0%} of the target's weights, {best.speedup:.2f}x predicted at {setup.num_draft_tokens} tokens"
        )
    if settings.exit_layer >= count:
        raise ConfigError(
            f"{OWNER}: exit_layer must be between 1 and {count - 1} for {name}, got "
            f"{settings.exit_layer}"
        )
    return list(
        range(settings.exit_layer, count)
    ), f"drafting with the first {settings.exit_layer} of {count} layers"
