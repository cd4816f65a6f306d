"""Cosines and sines by position: made by the model's own rotary modules, or of the few numbers that
say what those make.

Nearly all of transformers' modules are a `Wave`: position times frequency, its cosine or sine,
times a scale. One that is, to the bit, needs no module to be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.ops import Program, Source

BLOCK = 1024  # positions whose cosines and sines are made at once
# positions, the first and the last of a context, for which a wave is compared with the module
COMPARED = 4096

Maker = Callable[[Tensor], Tensor]  # positions (T,) -> (T, size)


@dataclass(frozen=True)
class Wave:
    """A table that is one function of position times frequency."""

    frequencies: tuple[float, ...]
    scale: float
    times: int  # how often each frequency stands in a row: once or twice
    side_by_side: bool  # both of them alongside one another, else all of them once and then again
    is_sine: bool
    dtype: str

    def __call__(self, positions: Tensor) -> Tensor:
        """(T,) -> (T, size)"""
        angles = positions[:, None].float() * torch.tensor(self.frequencies)
        if self.times > 1:
            angles = (
                angles.repeat_interleave(2, dim=-1)
                if self.side_by_side
                else torch.cat((angles, angles), dim=-1)
            )
        return (
            ((angles.sin() if self.is_sine else angles.cos()) * self.scale)
            .to(getattr(torch, self.dtype))
            .contiguous()
        )


class Rotary:
    """The tables of one program, as far as texts have come."""

    def __init__(self, makers: Sequence[Maker]) -> None:
        self.makers = tuple(makers)
        self._known: tuple[int, list[Tensor]] = (0, [])

    def up_to(self, position: int) -> list[Tensor]:
        """Tables (positions, size) that reach this position at least."""
        reach, tables = self._known
        if position >= reach and self.makers:
            reach = max(2 * reach, -(-(position + 1) // BLOCK) * BLOCK)
            positions = torch.arange(reach)
            tables = [maker(positions) for maker in self.makers]
            self._known = reach, tables  # at once: another thread may look
        return tables


def real_tables(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The result of a rotary module as real numbers (B, T, size): cosine and sine of complex ones
    side by side."""
    outputs = out if isinstance(out, tuple) else (out,)
    return tuple(
        torch.view_as_real(output).flatten(-2) if output.is_complex() else output
        for output in outputs
    )


def positions_for(part: Any, positions: Tensor) -> Tensor:
    """Positions (B, T) as a rotary module takes them: (axes, B, T) where it counts time, height,
    width, equal in texts."""
    if not hasattr(part, "mrope_section"):
        return positions
    # else by kind of layer
    axes = len(part.mrope_section) if isinstance(part.mrope_section, list) else 3
    return positions.expand(axes, -1, -1)


def rotary_of(module: Any, program: Program) -> Rotary:
    """Tables by the modules that the program was recorded with."""
    dtypes = {value.name: value.dtype for value in program.values if value.source == Source.ROTARY}
    return Rotary(
        [
            _by_module(module.get_submodule(path), further, which, dtypes[str(index)])
            for index, (path, further, which) in enumerate(program.rotary)
        ]
    )


def waves_of(module: Any, program: Program, reach: int) -> list[Wave] | None:
    """A wave for each table, equal to what its module makes of a context of `reach` positions; None
    where one is none."""
    made = rotary_of(module, program)
    positions = torch.cat([torch.arange(COMPARED), torch.arange(max(0, reach - COMPARED), reach)])
    waves = []
    for (path, _, _), maker in zip(program.rotary, made.makers, strict=True):
        table = maker(positions)
        wave = next(
            (
                candidate
                for candidate in _possible(module.get_submodule(path), table)
                if _same_bits(candidate(positions), table)
            ),
            None,
        )
        if wave is None:
            return None
        waves.append(wave)
    return waves


def _by_module(part: Any, further: tuple[object, ...], which: int, dtype: torch.dtype) -> Maker:
    def made(positions: Tensor) -> Tensor:
        out = part(torch.empty(1, dtype=dtype), positions_for(part, positions[None]), *further)
        return real_tables(out)[which][0].contiguous()

    return made


def _possible(part: Any, table: Tensor) -> Iterator[Wave]:
    """Waves of this table's size that the numbers of a module could make."""
    frequencies = [
        buffer
        for _, buffer in part.named_buffers()
        if buffer.dim() == 1 and buffer.is_floating_point()
    ]
    named = (value for name, value in vars(part).items() if name.endswith("attention_scaling"))
    scales = {float(value) for value in named if isinstance(value, float | int)}
    dtype = str(table.dtype).removeprefix("torch.")
    for frequency, scale, is_sine in product(frequencies, {1.0, *scales}, (False, True)):
        times, rest = divmod(table.shape[1], len(frequency))
        if not rest and times in (1, 2):
            for side_by_side in (False, True)[:times]:
                yield Wave(
                    tuple(frequency.float().tolist()), scale, times, side_by_side, is_sine, dtype
                )


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )
