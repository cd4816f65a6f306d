"""Rules of lowering for operations on numbers one by one, broadcast where they are fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.blocks import TRUTHS, Block, Index, Known, NotLoweredError
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code
from outrider.runtime.strides import Strided

UNARY = {
    "neg": Code.NEG, "rsqrt": Code.RSQRT, "sqrt": Code.SQRT, "tanh": Code.TANH, "sigmoid": Code.SIGMOID, "silu": Code.SILU,
    "relu": Code.RELU, "reciprocal": Code.RECIPROCAL, "square": Code.SQUARE, "exp": Code.EXP, "log": Code.LOG,
    "expm1": Code.EXPM1, "log1p": Code.LOG1P,
}  # fmt: skip


def to_copy(low: Lowering, event: Event) -> list[Known]:
    """A change of dtype; of the layout alone nothing is left to do."""
    tensor = event.args[0]
    out = event.outputs[0]
    if tensor.dtype == out.dtype or not tensor.is_floating_point():
        return [low.find(tensor)]
    if out.dtype == torch.bool:
        return differ(low, tensor, 0, out)
    return elementwise(low, Code.COPY, [tensor], out)


def elementwise(
    low: Lowering, code: Code, operands: Sequence[Any], out: Tensor, numbers: tuple[float, ...] = ()
) -> list[Known]:
    """Tensors and plain numbers, broadcast to the shape of `out`."""
    dtype = TRUTHS if out.dtype == torch.bool else out.dtype
    return [
        combined(
            low,
            code,
            [low.block(operand) for operand in operands],
            tuple(out.shape),
            dtype,
            numbers,
        )
    ]


def combined(
    low: Lowering,
    code: Code,
    blocks: Sequence[Block],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    numbers: tuple[float, ...] = (),
) -> Block:
    """Blocks, broadcast to this shape of the recording."""
    axes = [""] * len(shape)
    for block in blocks:
        for dim, axis in enumerate(block.axes, start=len(shape) - len(block.axes)):
            if axis and axes[dim] not in ("", axis):
                raise NotLoweredError("rows combined with tokens")
            axes[dim] = axes[dim] or axis
    result = low.value([size for size, axis in zip(shape, axes, strict=True) if not axis], dtype)
    low.emit(code, [_broadcast(block, axes, shape) for block in blocks], result, numbers)
    return Block(tuple(axes), result)


def _broadcast(block: Block, axes: Sequence[str], shape: tuple[int, ...]) -> Strided:
    """The block's own numbers at the sizes of a result with these axes."""
    missing = len(axes) - len(block.axes)
    sizes = []
    steps = []
    for dim, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        theirs, step, count = (
            ("", 0, 1)
            if dim < missing
            else (block.axes[dim - missing], block.steps[dim - missing], block.shape[dim - missing])
        )
        if axis and not theirs and count != 1:
            raise NotLoweredError("numbers of one token combined with another's")
        if not axis:
            sizes.append(size)
            steps.append(0 if count == 1 or step is None else step)
    return Strided(block.own.value, tuple(sizes), tuple(steps), block.own.offset)


def unary(code: Code, low: Lowering, event: Event) -> list[Known]:
    return elementwise(low, code, event.args[:1], event.outputs[0])


def binary(code: Code, low: Lowering, event: Event) -> list[Known]:
    """Two operands; a number added to token ids or positions is an offset."""
    first, second = event.args[:2]
    if event.kwargs.get("alpha", 1) != 1 or event.kwargs.get("rounding_mode"):
        raise NotLoweredError("a sum with a factor, or a rounded quotient")
    if (
        code == Code.ADD
        and isinstance(first, Tensor)
        and isinstance(block := low.find(first), Index)
        and isinstance(second, int)
    ):
        return [replace(block, offset=block.offset + second)]
    return elementwise(low, code, [first, second], event.outputs[0])


def reversed_difference(low: Lowering, event: Event) -> list[Known]:
    return elementwise(low, Code.SUB, [event.args[1], event.args[0]], event.outputs[0])


def power(low: Lowering, event: Event) -> list[Known]:
    tensor, exponent = event.args
    if exponent == 2:
        return elementwise(low, Code.SQUARE, [tensor], event.outputs[0])
    if exponent == 0.5:
        return elementwise(low, Code.SQRT, [tensor], event.outputs[0])
    if exponent == -0.5:
        return elementwise(low, Code.RSQRT, [tensor], event.outputs[0])
    if exponent != 3:
        raise NotLoweredError(f"numbers to the power of {exponent}")
    (square,) = elementwise(low, Code.SQUARE, [tensor], event.outputs[0])
    first = low.block(tensor)
    assert isinstance(square, Block)
    result = low.value(square.own.sizes, event.outputs[0].dtype)
    low.emit(Code.MUL, [square.own, first.own], result)
    return [Block(first.axes, result)]


def gelu(low: Lowering, event: Event) -> list[Known]:
    code = Code.GELU_TANH if event.kwargs.get("approximate") == "tanh" else Code.GELU
    return elementwise(low, code, event.args[:1], event.outputs[0])


def clamp(low: Lowering, event: Event) -> list[Known]:
    bounds = [*event.args[1:], None, None][:2]
    low_bound, high_bound = (
        event.kwargs.get(name, bound) for name, bound in zip(("min", "max"), bounds, strict=True)
    )
    if isinstance(low_bound, Tensor) and high_bound is None:
        return elementwise(low, Code.LARGER, [event.args[0], low_bound], event.outputs[0])
    if isinstance(low_bound, Tensor) or isinstance(high_bound, Tensor):
        raise NotLoweredError("numbers between two bounds that are tensors")
    numbers = (
        float("-inf") if low_bound is None else low_bound,
        float("inf") if high_bound is None else high_bound,
    )
    return elementwise(low, Code.CLAMP, event.args[:1], event.outputs[0], numbers)


def absolute(low: Lowering, event: Event) -> list[Known]:
    """The larger of a number and its negative."""
    block = low.block(event.args[0])
    (out,) = event.outputs
    negative = combined(low, Code.NEG, [block], tuple(out.shape), out.dtype)
    return [combined(low, Code.LARGER, [block, negative], tuple(out.shape), out.dtype)]


def softplus(low: Lowering, event: Event) -> list[Known]:
    numbers = tuple(float(item) for item in (*event.args[1:], *(1.0, 20.0)[len(event.args) - 1 :]))
    return elementwise(low, Code.SOFTPLUS, event.args[:1], event.outputs[0], numbers)


def compared(code: Code, low: Lowering, event: Event, *, reversed_: bool = False) -> list[Known]:
    first, second = event.args[:2]
    return elementwise(
        low, code, [second, first] if reversed_ else [first, second], event.outputs[0]
    )


def differ(low: Lowering, first: Any, second: Any, out: Tensor) -> list[Known]:
    """Whether numbers are different."""
    (equal,) = elementwise(low, Code.EQUAL, [first, second], out)
    assert isinstance(equal, Block)
    result = low.value(equal.own.sizes, TRUTHS)
    low.emit(Code.NOT, [equal.own], result)
    return [Block(equal.axes, result)]


def not_equal(low: Lowering, event: Event) -> list[Known]:
    return differ(low, event.args[0], event.args[1], event.outputs[0])


def negated(low: Lowering, event: Event) -> list[Known]:
    if event.outputs[0].dtype != torch.bool:
        raise NotLoweredError("bits turned around")
    return elementwise(low, Code.NOT, event.args[:1], event.outputs[0])


def where(low: Lowering, event: Event) -> list[Known]:
    return elementwise(low, Code.WHERE, event.args, event.outputs[0])


def masked_fill(low: Lowering, event: Event) -> list[Known]:
    tensor, mask, value = event.args
    return elementwise(low, Code.WHERE, [mask, value, tensor], event.outputs[0])


def filled(number: float | None, low: Lowering, event: Event) -> list[Known]:
    """Numbers of the shape of others, all the same."""
    block = low.block(event.args[0])
    filler = low.block(event.args[1] if number is None else number).own
    return [Block(block.axes, Strided(filler.value, block.own.sizes, (0,) * len(block.own.sizes)))]


ELEMENTWISE: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    **{name: partial(unary, code) for name, code in UNARY.items()},
    "_to_copy": to_copy, "add": partial(binary, Code.ADD), "sub": partial(binary, Code.SUB), "mul": partial(binary, Code.MUL),
    "div": partial(binary, Code.DIV), "rsub": reversed_difference, "pow": power, "gelu": gelu, "abs": absolute, "clamp": clamp,
    "softplus": softplus, "where": where, "masked_fill": masked_fill, "logical_not": negated, "bitwise_not": negated,
    "gt": partial(compared, Code.GREATER), "lt": partial(compared, Code.GREATER, reversed_=True),
    "ge": partial(compared, Code.AT_LEAST), "le": partial(compared, Code.AT_LEAST, reversed_=True),
    "eq": partial(compared, Code.EQUAL), "ne": not_equal,
    "minimum": partial(binary, Code.SMALLER), "maximum": partial(binary, Code.LARGER),
    "zeros_like": partial(filled, 0.0), "ones_like": partial(filled, 1.0), "full_like": partial(filled, None),
}  # fmt: skip
