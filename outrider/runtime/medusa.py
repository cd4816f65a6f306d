"""Medusa heads (`models/heads/medusa.py`) on the native runtime: one pass of all residual blocks,
then the output layer.

An output layer that all heads share multiplies all of their states in one go, with the target's own
panels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.models.heads.medusa import MedusaHeads
from outrider.models.signals import AFTER_NORM
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.lower import program_of
from outrider.runtime.record import record_part
from outrider.runtime.run import Executor, bind


class MedusaRun:
    """Run the heads on features: the `run` of `MedusaHeads`."""

    def __init__(self, heads: MedusaHeads, path: Path) -> None:
        """The heads are bound to their target, all linear layers plain. Raises NotLoweredError
        where they cannot run there."""
        size = heads.config.hidden_size
        parts = heads.parts
        outputs: list[Any] = (
            [part.output for part in parts] if heads.config.own_output else [heads.target_output]
        )

        def lowered(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Executor:
            def part(
                ids: Tensor, positions: Tensor, inputs: list[Tensor], attend: object
            ) -> tuple[dict[int, Tensor], Tensor]:
                logits = forward(inputs[0])
                return {AFTER_NORM: logits}, logits

            try:
                recording = record_part(
                    module, heads.config.vocab_size, [(size, heads.dtype)], part
                )
            except CapabilityError as error:
                raise NotLoweredError(str(error)) from error
            return bind(program_of(module, recording), module, (), heads.dtype, path).executor

        self._blocks = lowered(
            heads, lambda features: torch.cat([part(features) for part in parts], dim=-1)
        )
        self._outputs = [lowered(nn.ModuleList([output]), output) for output in outputs]
        self._shape = (heads.num_heads, size)

    def __call__(self, features: Tensor) -> Tensor:
        """Features (N, H) -> logits (N, heads, V), as the output layers give them."""
        states = self._blocks.map(features.contiguous()).unflatten(1, self._shape)
        if len(self._outputs) == 1:
            return self._outputs[0].map(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        flat = states.transpose(0, 1).contiguous()
        return torch.stack(
            [output.map(each) for output, each in zip(self._outputs, flat, strict=True)], dim=1
        )
