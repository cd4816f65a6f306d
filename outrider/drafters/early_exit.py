"""The target without its last layers, or without some of its layers, as the draft: no second model, no second cache.

The draft runs on the target's own weights (`models/truncate.py`) and on the target's own keys and values (`kv/view.py`):
the committed prefix is already there for every layer it runs, so there is nothing to feed but the pending token. What it
writes for its draft tokens, the target's pass over them writes again. Drafting itself is that of any draft model.

Source: LayerSkip (Elhoushi et al. 2404.16710), whose models were trained for it; Draft & Verify (Zhang et al. 2309.08168)
for subsets of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.drafters.base import DraftSetup
from outrider.drafters.draft_model import ModelDrafter
from outrider.errors import CapabilityError, ConfigError
from outrider.kv import KVCache
from outrider.kv.view import KVView
from outrider.models.derive import derived_lm, own_module
from outrider.models.exit_search import find_exit
from outrider.models.lm import LM
from outrider.models.truncate import DecoderLayers
from outrider.rows import Rows
from outrider.settings import setting
from outrider.types import Draft, TargetOutput, Verdict

OWNER = "drafter 'early-exit'"


@dataclass(frozen=True)
class EarlyExitSettings:
    """Which layers draft."""

    exit_layer: int | Literal["auto"] = setting("auto", "draft with the first E layers; auto measures which E pays most")
    skip_layers: str = setting("", "instead of an exit: layers left out of the draft, counted from 0, like 3,4,7")

    def __post_init__(self) -> None:
        if self.exit_layer != "auto" and self.exit_layer < 1:
            raise ConfigError(f"{OWNER}: exit_layer must be 'auto' or at least 1, got {self.exit_layer}")
        if self.exit_layer != "auto" and self.skip_layers:
            raise ConfigError(f"{OWNER}: give exit_layer or skip_layers, not both")
        numbers = self.skipped()
        if len(set(numbers)) < len(numbers):
            raise ConfigError(f"{OWNER}: skip_layers names a layer twice: '{self.skip_layers}'")

    def skipped(self) -> list[int]:
        """The layers of `skip_layers`. Raises ConfigError when it is no list of numbers."""
        words = [word.strip() for word in self.skip_layers.split(",")] if self.skip_layers else []
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"{OWNER}: skip_layers must be layer numbers like 3,4,7, got '{self.skip_layers}'")
        return [int(word) for word in words]


class EarlyExitDrafter(ModelDrafter):
    """Chains from some of the target's layers."""

    needs = "nothing; best with a model trained for early exits"
    needs_draft = False
    needs_module = True
    Settings = EarlyExitSettings

    def __init__(self, lm: LM, cache: KVCache, note: str) -> None:
        """`cache`: the target's."""
        super().__init__(lm)
        self._view = lm.kv = KVView(cache)
        self._note = note

    @property
    def notes(self) -> list[str]:
        return [self._note]

    @classmethod
    def build(cls, setup: DraftSetup) -> EarlyExitDrafter:
        target = setup.target
        layers = DecoderLayers(own_module(target.module, "early-exit"), target.lm, target.name)
        skipped, note = _choose_layers(setup, layers)
        lm = derived_lm(layers.without(skipped), target.lm, f"'{target.name}' without layers {', '.join(map(str, skipped))}")
        return cls(lm, target.lm.kv, note)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self._view.follow()

    def _catch_up(self, rows: Rows) -> list[list[int]]:
        """The target has just caught up, so only the pending token is missing."""
        self._view.follow()
        return super()._catch_up(rows)


def _choose_layers(setup: DraftSetup, layers: DecoderLayers) -> tuple[list[int], str]:
    """The layers to leave out, and a line about them. Raises ConfigError or CapabilityError when they do not exist."""
    settings, count, name = setup.settings, len(layers), setup.target.name
    if count < 2:
        raise CapabilityError(f"{name} has {count} layer, so a draft cannot leave one out. Use another drafter.")
    if settings.skip_layers:
        skipped = sorted(settings.skipped())
        if skipped[-1] >= count or len(skipped) == count:
            raise ConfigError(
                f"{OWNER}: skip_layers must leave out some of layers 0..{count - 1} of {name}, got '{settings.skip_layers}'"
            )
        return skipped, f"drafting without layers {', '.join(map(str, skipped))} of 0..{count - 1}"
    if settings.exit_layer == "auto":
        found = find_exit(layers, setup.target, setup.num_draft_tokens)
        return list(range(found.layer, count)), (
            f"drafting with the first {found.layer} of {count} layers: {found.acceptance:.0%} of greedy tokens right at "
            f"{found.cost:.0%} of the target's weights, {found.speedup:.2f}x predicted at {setup.num_draft_tokens} tokens"
        )
    if settings.exit_layer >= count:
        raise ConfigError(f"{OWNER}: exit_layer must be between 1 and {count - 1} for {name}, got {settings.exit_layer}")
    return list(range(settings.exit_layer, count)), f"drafting with the first {settings.exit_layer} of {count} layers"
