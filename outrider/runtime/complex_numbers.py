"""Rules of lowering for complex numbers, with which DeepSeek V2 and Llama 4 rotate queries and keys
by their position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.runtime.blocks import Block, Complex, Known, NotLoweredError
from outrider.runtime.elementwise import ELEMENTWISE, combined
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code


def from_pairs(low: Lowering, event: Event) -> list[Known]:
    """view_as_complex: (..., 2) -> (...)"""
    pairs = low.block(event.args[0])
    if pairs.axes[-1]:
        raise NotLoweredError("complex numbers made of several tokens")
    return [Complex(pairs)]


def to_pairs(low: Lowering, event: Event) -> list[Known]:
    """view_as_real: (...) -> (..., 2)"""
    return [_numbers(low, event.args[0]).pairs]


def multiply(low: Lowering, event: Event) -> list[Known]:
    """A product of real numbers, or (a + bi)(c + di) of complex ones."""
    (out,) = event.outputs
    if not out.is_complex():
        return list(ELEMENTWISE["mul"](low, event))
    if out.dtype != torch.complex64:
        raise NotLoweredError("complex numbers of another type than complex64")
    (a, b), (c, d) = (_parts(_numbers(low, factor).pairs) for factor in event.args)

    def product(left: Block, right: Block) -> Block:
        return combined(low, Code.MUL, (left, right), tuple(out.shape), torch.float32)

    first = product(a, c)
    result = low.value((*first.own.sizes, 2), torch.float32)
    parts = _parts(Block((*first.axes, ""), result))
    low.emit(Code.SUB, [first.own, product(b, d).own], parts[0].own)
    low.emit(Code.ADD, [product(a, d).own, product(b, c).own], parts[1].own)
    return [Complex(Block((*first.axes, ""), result))]


def _numbers(low: Lowering, tensor: Tensor) -> Complex:
    values = low.find(tensor) if isinstance(tensor, Tensor) else None
    if not isinstance(values, Complex):
        raise NotLoweredError("complex numbers combined with real ones")
    return values


def _parts(pairs: Block) -> list[Block]:
    """Real and imaginary parts."""
    block = pairs.own
    sizes = block.sizes[:-1]
    steps = block.steps[:-1]
    apart = block.steps[-1]
    return [
        Block(
            pairs.axes[:-1],
            replace(block, sizes=sizes, steps=steps, offset=block.offset + part * apart),
        )
        for part in range(2)
    ]


COMPLEX: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    "view_as_complex": from_pairs, "view_as_real": to_pairs, "mul": multiply,
}  # fmt: skip
