"""The target's own weights in 4 or 8 bits as the draft model: no second checkpoint, no training.

It drafts on the target's own keys and values (`self_speculation.py`); the weights are
`models/derived/quantise.py`. Self-speculation by quantisation: e.g. QuantSpec (Tiwari et al.
2502.10424), ML-SpecQD (Georganas et al. 2503.13565).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.drafters.base import DraftSetup
from outrider.drafters.model.self_speculation import SelfDrafter
from outrider.drafters.requirements import Requirements
from outrider.errors import CapabilityError, ConfigError
from outrider.models.derived.derive import derived_lm, own_module
from outrider.models.derived.quantise import (
    BITS,
    GROUP_SIZES,
    added_bytes,
    check_kernels,
    estimated_bytes,
    quantised_copy,
)
from outrider.models.lm import LM
from outrider.models.loaded import LoadedModel
from outrider.models.loading.memory import available_memory
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.derived import native_derived_lm
from outrider.runtime.run import NativeRun
from outrider.settings import checked, setting

MIB = 1 << 20
# by default: nearly all are kept, so a step's fixed costs want many to share them
NUM_DRAFT_TOKENS = 8


@checked()
@dataclass(frozen=True)
class QuantisedSettings:
    """The format in which weights are kept."""

    bits: int = setting(4, "bits per weight, 4 or 8")
    group_size: int | None = setting(
        None, "4 bits only: inputs that share a scale, 32 (the default), 64 or 128"
    )
    quantise_head: bool = setting(
        True, "the output layer, too; false: the target's own, more exact and more bytes to read"
    )

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"drafter 'quantised': bits must be 4 or 8, got {self.bits}")
        if self.group_size is not None and self.bits == 8:
            raise ConfigError(
                "drafter 'quantised': group_size is for bits=4; 8 bits have one scale per output"
            )
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ConfigError(
                f"drafter 'quantised': group_size must be 32, 64 or 128, got {self.group_size}"
            )


class QuantisedDrafter(SelfDrafter):
    """Chains from the quantised target."""

    needs = "nothing but memory for a second, smaller copy of the weights (CPU)"
    requires = Requirements(module=True, num_draft_tokens=NUM_DRAFT_TOKENS)
    Settings = QuantisedSettings

    def __init__(self, lm: LM, setup: DraftSetup, num_bytes: int, notes: list[str]) -> None:
        self.bits = setup.settings.bits
        self.added_bytes = num_bytes  # weights alone; keys and values are the target's
        self._notes = [
            f"the int{self.bits} draft takes {num_bytes / MIB:.1f} MiB alongside the target",
            *notes,
        ]
        super().__init__(lm, setup.target.lm)

    @property
    def notes(self) -> list[str]:
        """For a person, one line each."""
        return self._notes

    @classmethod
    def build(cls, setup: DraftSetup) -> QuantisedDrafter:
        target = setup.target
        settings = setup.settings
        check_kernels(target.lm.device)
        module = own_module(target.module, "quantised")
        group_size = settings.group_size or GROUP_SIZES[0]
        _check_memory(
            estimated_bytes(module, settings.bits, group_size, head=settings.quantise_head),
            target.lm,
            settings,
        )
        notes: list[str] = []
        lm, num_bytes = _draft_of(module, target, settings, notes)
        return cls(lm, setup, num_bytes, notes)


def _draft_of(
    module: Any, target: LoadedModel, settings: QuantisedSettings, notes: list[str]
) -> tuple[LM, int]:
    """The copy, and the bytes that it takes. Our own kernels serve bf16, torch's all else."""
    name = f"the int{settings.bits} copy of '{target.label}'"
    group_size = settings.group_size or GROUP_SIZES[0]

    def copy(*, native: bool) -> nn.Module:
        return quantised_copy(
            module,
            settings.bits,
            group_size,
            head=settings.quantise_head,
            native=native,
            name=target.label,
        )

    if isinstance(target.lm.run, NativeRun):
        try:
            if target.lm.dtype != torch.bfloat16:
                raise NotLoweredError("weights in 4 and 8 bits multiply bfloat16 there")
            draft = copy(native=True)
            return native_derived_lm(draft, target.lm, name), added_bytes(draft)
        except NotLoweredError as error:
            notes.append(f"{name} runs without the native runtime: {error}")
    draft = copy(native=False)
    return derived_lm(draft, target.lm, name), added_bytes(draft)


def _check_memory(needed: int, target: LM, settings: QuantisedSettings) -> None:
    """Raises CapabilityError when the copy cannot fit."""
    available = available_memory(target.device)
    if needed > available:
        smaller = "bits=4, " if settings.bits == 8 else ""
        raise CapabilityError(
            f"not enough memory for the int{settings.bits} draft: {needed / MIB:.0f} MiB needed "
            "alongside the target, "
            f"{available / MIB:.0f} available; try {smaller}--drafter early-exit, which shares "
            "all weights, or ngram."
        )
