"""Rules of lowering for products with the model's own matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.runtime.blocks import Block, Known, NotLoweredError
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code, Op, View
from outrider.runtime.reducing import small_products
from outrider.runtime.strides import dense


def linear(
    low: Lowering, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, transposed: bool
) -> list[Known]:
    return [
        multiplied(low, low.block(x), weight, bias, (x.dtype, out.dtype), transposed=transposed)
    ]


def multiplied(
    low: Lowering,
    block: Block,
    weight: Tensor,
    bias: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    transposed: bool,
) -> Block:
    """A matrix product over the last dimension. `dtypes`: of the numbers before and after it."""
    names = low.name(weight), low.name(bias)
    inputs, outputs = weight.shape if transposed else tuple(weight.shape)[::-1]
    if block.axes[-1:] != ("",) or block.own.sizes != (inputs,):
        raise NotLoweredError("a matrix product of a token's parts")
    if any(dtype != weight.dtype for dtype in (*dtypes, *(() if bias is None else (bias.dtype,)))):
        raise NotLoweredError("a matrix product of mixed types")
    result = low.new(outputs, dtypes[1])
    low.add(
        Op(
            Code.LINEAR,
            (low.whole(block),),
            result,
            weight=names[0],
            bias=names[1],
            transposed=transposed,
        )
    )
    return Block(block.axes, dense(result.value, (outputs,)))


def matrix(low: Lowering, event: Event) -> list[Known]:
    """A linear layer that keeps its weights in integers."""
    path, layer, x = event.args
    (out,) = event.outputs
    block = low.block(x)
    if block.axes[-1:] != ("",) or block.own.sizes != (layer.in_features,):
        raise NotLoweredError("a matrix product of a token's parts")
    if layer.bias is not None and layer.bias.dtype != out.dtype:
        raise NotLoweredError("a matrix product of mixed types")
    result = low.new(layer.out_features, out.dtype)
    low.add(
        Op(
            Code.LINEAR,
            (low.whole(block),),
            result,
            weight=low.matrix(path, layer),
            bias=low.bias(path, layer.bias),
        )
    )
    return [Block(block.axes, dense(result.value, (layer.out_features,)))]


def mm(low: Lowering, event: Event) -> list[Known]:
    weight, transposed = low.weight(event.args[1])
    return linear(low, event.args[0], weight, None, event.outputs[0], transposed=transposed)


def addmm(low: Lowering, event: Event) -> list[Known]:
    bias, x, factor = event.args
    if event.kwargs:
        raise NotLoweredError("a matrix product with factors")
    weight, transposed = low.weight(factor)
    return linear(low, x, weight, bias, event.outputs[0], transposed=transposed)


def plain_linear(low: Lowering, event: Event) -> list[Known]:
    x, weight, bias = (*event.args, None)[:3]
    return linear(low, x, weight, bias, event.outputs[0], transposed=False)


def bmm(low: Lowering, event: Event) -> list[Known]:
    """One weight for all rows, after or before numbers of tokens that are rows or columns; or
    small matrices of each token."""
    weight = low.spread(event.args[0])
    x = event.args[1]
    if (factor := low.spread(event.args[1])) is not None:
        weight, transposed = low.weight(factor)
        return linear(low, event.args[0], weight, None, event.outputs[0], transposed=transposed)
    if weight is None:
        return small_products(low, event)
    block = low.block(x)
    if block.axes != ("B", "", "T"):
        raise NotLoweredError("a matrix product of a token's parts")
    dtypes = (x.dtype, event.outputs[0].dtype)
    result = multiplied(
        low, Block(("B", "T", ""), block.own), weight, None, dtypes, transposed=False
    )
    return [Block(block.axes, result.own)]


def baddbmm(low: Lowering, event: Event) -> list[Known]:
    """Each part (parts, tokens, numbers) with a weight (parts, in, out) and a bias of its own:
    experts that all tokens choose."""
    bias, x, weight = event.args
    block = low.block(x)
    (out,) = event.outputs
    parts, inputs, outputs = weight.shape
    if (
        event.kwargs
        or block.axes != ("", "N", "")
        or block.own.sizes != (parts, inputs)
        or bias.shape != (parts, 1, outputs)
    ):
        raise NotLoweredError("a product of parts of an unusual shape")
    if not (weight.dtype == bias.dtype == x.dtype == out.dtype):
        raise NotLoweredError("a product of parts of mixed types")
    result = low.value((parts, outputs), out.dtype)
    flat = low.flat(block)
    choice = low.flat(low.block(torch.arange(parts, dtype=torch.float32)))
    low.add(
        Op(
            Code.EXPERTS,
            (View(flat.value, parts, inputs, flat.offset, inputs), choice),
            View(result.value, parts, outputs, 0, outputs),
            weight=low.name(weight),
            bias=low.name(bias),
            transposed=True,
        )
    )
    return [Block(block.axes, result)]


PRODUCTS: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    "mm": mm, "addmm": addmm, "linear": plain_linear, "matrix": matrix, "bmm": bmm, "baddbmm": baddbmm,
}  # fmt: skip
