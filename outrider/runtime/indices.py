"""Rules of lowering for token ids that are compared with the length of a table: those beyond it
read the table's first row.

Gemma 3n asks so, because its per-layer embeddings end before its vocabulary does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.runtime.blocks import Index, IsBelow, Known, NotLoweredError
from outrider.runtime.elementwise import ELEMENTWISE
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering


def compared(low: Lowering, event: Event) -> list[Known]:
    """Numbers, or token ids with a bound: `ids < bound`; none is below 0."""
    tensor, bound = event.args[:2]
    index = _find(low, tensor)
    if index != Index(by_position=False) or not isinstance(bound, int):
        return list(ELEMENTWISE[event.name](low, event))
    if event.name == "ge" and bound <= 0:
        return [IsBelow(None)]
    if event.name == "lt" and bound > 0:
        return [IsBelow(bound)]
    raise NotLoweredError("token ids compared with something else than a table's length")


def both(low: Lowering, event: Event) -> list[Known]:
    """logical_and of two such comparisons."""
    pair = [_find(low, tensor) for tensor in event.args[:2]]
    bounds = [operand.bound for operand in pair if isinstance(operand, IsBelow)]
    if len(bounds) < 2:
        raise NotLoweredError(f"torch's '{event.name}'")
    return [IsBelow(min((bound for bound in bounds if bound is not None), default=None))]


def where(low: Lowering, event: Event) -> list[Known]:
    """Numbers, or where(ids < bound, ids, 0)."""
    condition, first, second = event.args
    truth = _find(low, condition)
    index = _find(low, first)
    if not isinstance(truth, IsBelow):
        return list(ELEMENTWISE["where"](low, event))
    if index != Index(by_position=False) or _number(second) != 0:
        raise NotLoweredError("token ids replaced by others than 0")
    return [replace(index, bound=truth.bound)]


def _find(low: Lowering, tensor: Any) -> Known | None:
    return (
        low.find(tensor) if isinstance(tensor, Tensor) and not tensor.is_floating_point() else None
    )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


INDICES: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    "ge": compared, "lt": compared, "logical_and": both, "bitwise_and": both, "__and__": both, "where": where,
}  # fmt: skip
