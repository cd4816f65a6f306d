"""Numbers that follow from a token's position alone, such as queries' scales in long texts: tables, made by the model's own code.

The operations that made them in the recorded pass are made again for every position that the model's context has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.events import Event

# one position's number each, whatever stands beside it
OPERATIONS = frozenset({
    "_to_copy", "add", "sub", "rsub", "mul", "div", "pow", "exp", "log", "log1p", "floor", "sqrt", "rsqrt", "reciprocal", "clamp",
    "unsqueeze", "repeat", "alias", "detach", "clone", "bitwise_not", "logical_not",
})  # fmt: skip
MAX_NUMBERS = 1 << 24  # of a table


@dataclass(frozen=True)
class Positional:
    """`make`: positions (1, L) -> numbers (1, ..., L, ...), with the L at `axes`' "T"."""

    axes: tuple[str, ...]
    make: Callable[[Tensor], Tensor]
    settles: int | None = None  # from this position on numbers are all alike
    is_position: bool = False  # the numbers are the positions themselves

    def table(self, length: int) -> Tensor:
        """(length, numbers of a position)"""
        found = self.make(torch.arange(length)[None])
        return found.movedim(self.axes.index("T"), 0).reshape(length, -1).contiguous()


def followed(event: Event, known: dict[int, Positional], is_constant: Callable[[Tensor], bool]) -> Positional | None:
    """What an operation makes of such numbers and constants; None where it may mix positions."""
    if event.name in ("index", "gather"):
        return _rows(event, known) if is_constant(event.args[0]) else None
    if event.name == "eq":
        return _equal(event, known)
    arguments = [argument for argument, arg in enumerate(event.args) if isinstance(arg, Tensor) and id(arg) in known]
    if event.name not in OPERATIONS or len(arguments) != 1:
        return None
    (argument,) = arguments
    before, args = known[id(event.args[argument])], event.args
    axes = before.axes
    if event.name == "repeat" and any(count > 1 for count, axis in zip(args[1], axes, strict=True) if axis):
        return None
    if event.name == "unsqueeze":
        at = args[1] % (len(axes) + 1)
        axes = (*axes[:at], "", *axes[at:])
    if len(axes) != event.outputs[0].dim() or any(isinstance(arg, Tensor) and arg.numel() > 1 for arg in _others(args, argument)):
        return None
    operation = getattr(torch.ops.aten, event.name)

    def make(positions: Tensor) -> Tensor:
        given: list[Any] = list(args)
        given[argument] = before.make(positions)
        return operation(*given, **event.kwargs)

    return Positional(axes, make, before.settles, before.is_position and event.name in ("unsqueeze", "alias", "detach"))


def _equal(event: Event, known: dict[int, Positional]) -> Positional | None:
    """Whether a position is this one, as in `positions == 0`."""
    tensor, number = event.args
    before = known.get(id(tensor))
    if before is None or not before.is_position or not isinstance(number, int):
        return None
    make = before.make
    return Positional(before.axes, lambda positions: make(positions) == number, max(number, -1) + 1)


def _rows(event: Event, known: dict[int, Positional]) -> Positional | None:
    """Rows of a table that positions name: table[positions], or such a gather from copies of a table for each row of the pass."""
    if event.name == "index":
        table, (index, *others) = event.args
        if (before := known.get(id(index))) is None or others:
            return None
        make = before.make
        return Positional((*before.axes, *[""] * (table.dim() - 1)), lambda positions: table[make(positions)])
    table, dim, index = event.args
    before = known.get(id(index))
    if before is None or before.axes != ("B", "T", "") or dim != 1 or not torch.equal(table, table[:1].expand_as(table)):
        return None
    make = before.make
    return Positional(before.axes, lambda positions: table[:1].gather(1, make(positions)))


def _others(args: tuple[Any, ...], argument: int) -> list[Any]:
    return [arg for index, arg in enumerate(args) if index != argument]
