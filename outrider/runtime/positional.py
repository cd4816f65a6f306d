"""Numbers that follow from a token's position alone, such as queries' scales in long texts: tables,
made by the model's own code.

The operations that made them in the recorded pass are made again for every position that the
model's context has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.events import Event

# one position's number each, whatever stands alongside it
OPERATIONS = frozenset({
    "_to_copy", "add", "sub", "rsub", "mul", "div", "pow", "exp", "log", "log1p", "floor", "sqrt", "rsqrt", "reciprocal", "clamp",
    "unsqueeze", "repeat", "alias", "detach", "clone",
})  # fmt: skip
MAX_NUMBERS = 1 << 24  # of a table


@dataclass(frozen=True)
class Positional:
    """`make`: positions (1, L) -> numbers (1, ..., L, ...), with the L at `axes`' "T"."""

    axes: tuple[str, ...]
    make: Callable[[Tensor], Tensor]

    def table(self, length: int) -> Tensor:
        """(length, numbers of a position)"""
        found = self.make(torch.arange(length)[None])
        return found.movedim(self.axes.index("T"), 0).reshape(length, -1).contiguous()


def followed(event: Event, known: dict[int, Positional]) -> Positional | None:
    """The result of an operation on such numbers and single constants; None where it may mix
    positions."""
    arguments = [
        argument
        for argument, arg in enumerate(event.args)
        if isinstance(arg, Tensor) and id(arg) in known
    ]
    if event.name not in OPERATIONS or len(arguments) != 1:
        return None
    (argument,) = arguments
    before = known[id(event.args[argument])]
    args = event.args
    axes = before.axes
    if event.name == "repeat" and any(
        count > 1 for count, axis in zip(args[1], axes, strict=True) if axis
    ):
        return None
    if event.name == "unsqueeze":
        at = args[1] % (len(axes) + 1)
        axes = (*axes[:at], "", *axes[at:])
    if len(axes) != event.outputs[0].dim() or any(
        isinstance(arg, Tensor) and arg.numel() > 1 for arg in _others(args, argument)
    ):
        return None
    operation = getattr(torch.ops.aten, event.name)

    def make(positions: Tensor) -> Tensor:
        given: list[Any] = list(args)
        given[argument] = before.make(positions)
        return operation(*given, **event.kwargs)

    return Positional(axes, make)


def _others(args: tuple[Any, ...], argument: int) -> list[Any]:
    return [arg for index, arg in enumerate(args) if index != argument]
