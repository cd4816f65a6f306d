"""Which configurations can be replayed: those whose drafts are a function of the text, at a draft length that is fixed.

Refused by name, with the reason: drafters that run a model or read the target's logits; verifiers that keep other tokens than
the target's own; `k=auto`, which follows the clock of a machine that is not there.
"""

from __future__ import annotations

from typing import Any

from outrider.draft_length import FixedLength
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter
from outrider.drafters.composite import CompositeDrafter
from outrider.errors import CapabilityError, OutriderError
from outrider.lab.configuration import PLAIN, Configuration
from outrider.lab.replay.loop import LoggedRow, ReplayLoop
from outrider.lab.replay.target import text_target
from outrider.lab.replay.texts import Text
from outrider.parts import Parts
from outrider.verifiers import VERIFIERS

TRIAL, TRIAL_VOCABULARY = Text([1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2]), 1000  # what a drafter is tried on


def replayable_parts(configuration: Configuration) -> Parts:
    """What it means. Raises ConfigError for unknown names and values, CapabilityError for what cannot be replayed."""
    verifier = configuration.verifier
    if verifier != "auto" and not VERIFIERS.load(verifier).lossless:
        raise CapabilityError(
            f"verifier '{verifier}' keeps tokens that the target would not emit, so the log does not show which; "
            "replay with a lossless one"
        )
    parts = configuration.parts()
    if reason := _why_not(parts):
        raise CapabilityError(
            f"drafter '{configuration.drafter}' {reason}, and a replay has only text. Replayable: {', '.join(replayable())}, "
            "and composites of these; measure the others with 'outrider bench'"
        )
    if parts.length.is_auto:
        raise CapabilityError(
            f"'{configuration.label}': k=auto follows the clock, and a replay has none: give a number, like "
            f"k={parts.length.max_nodes}, or replay every length with --sweep"
        )
    return parts


def replayable() -> list[str]:
    """Names of the drafters that can be replayed, whatever options they need, plain decoding left out."""
    return [name for name in DRAFTERS.names() if name not in (PLAIN, "composite") and _reads_only_text(name)]


def default_configurations() -> list[Configuration]:
    """Every replayable drafter that needs no option."""
    found = []
    for name in replayable():
        try:
            Configuration(name).parts()
        except OutriderError:  # needs an option, like retrieval its corpus
            continue
        found.append(Configuration(name))
    return found


def _why_not(parts: Parts) -> str:
    """Why a drafter cannot be replayed, in words; empty when it can."""
    if issubclass(parts.drafter, CompositeDrafter):
        for name, (kind, settings) in parts.drafter.part_classes(parts.drafter_settings).items():
            if reason := _why_not_alone(name, kind, settings):
                return f"has the part '{name}', which {reason}"
        return ""
    return _why_not_alone(parts.drafter_name, parts.drafter, parts.drafter_settings)


def _why_not_alone(name: str, kind: type[Drafter], settings: Any) -> str:
    required = kind.requirements(settings)
    if required.draft:
        return "runs a draft model"
    if required.module:
        return "runs on the target's own weights"
    if required.prediction:
        return "follows what a request predicts"
    if not kind.keeps_costs:
        return "asks a draft service"
    return "" if _reads_only_text(name) else "learns from the target's passes"


def _reads_only_text(name: str) -> bool:
    """Class attributes say who runs a model; who reads what a target's pass brings shows on a few words."""
    kind = DRAFTERS.load(name)
    if kind.requires.draft or kind.requires.module or kind.requires.head or not kind.keeps_costs:
        return False
    try:
        parts = Configuration(name).parts()
    except OutriderError:
        return True  # needs an option; should it read more than text, its first step says so
    if parts.requirements.prediction:
        return False
    try:
        try_on_text(parts, name)
    except CapabilityError:
        return False
    return True


def try_on_text(parts: Parts, name: str) -> None:
    """A few steps on a toy text. Raises CapabilityError when the drafter wants a model."""
    target = text_target(None, TRIAL_VOCABULARY)
    loop = ReplayLoop(name, parts.make_drafter(target, None), FixedLength(parts.length.max_nodes), TRIAL_VOCABULARY)
    loop.add(LoggedRow.of(TRIAL, 0))
    while not loop.rows[0].finish_reason:
        loop.step()
