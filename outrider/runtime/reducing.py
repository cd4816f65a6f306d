"""Rules of lowering for operations over the numbers of a row: sums, means, norms, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.runtime.blocks import Block, Known, NotLoweredError
from outrider.runtime.elementwise import combined
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code
from outrider.runtime.strides import Strided

MAX_ADDED = 64  # numbers of a sum that is written out


def reducing(code: Code, low: Lowering, event: Event) -> list[Known]:
    """A mean or sum over the last dimension; over another one it is written out."""
    tensor, dims, *keep = event.args
    block = low.block(tensor)
    own_dims = [dim % tensor.dim() for dim in dims]
    if len(own_dims) == 1 and own_dims[0] < tensor.dim() - 1 and not any(keep):
        return added_up(code, low, block, own_dims[0], event.outputs[0])
    if own_dims != [tensor.dim() - 1] or block.axes[-1]:
        raise NotLoweredError("a sum over something else than the last dimension")
    rows = block.own.sizes[:-1]
    cols = block.own.sizes[-1]
    result = low.value((*rows, 1), event.outputs[0].dtype)
    low.emit(
        code,
        [block.own],
        replace(result, sizes=(*rows, cols), steps=(*result.steps[:-1], 0)),
        keep_last=True,
    )
    if (*keep, False)[0]:
        return [Block(block.axes, result)]
    return [Block(block.axes[:-1], replace(result, sizes=rows, steps=result.steps[:-1]))]


def added_up(code: Code, low: Lowering, block: Block, dim: int, out: Tensor) -> list[Known]:
    """A sum or mean of a few numbers of each token that lie apart, in their order, in fp32 until
    the last one."""
    if block.axes[dim]:
        raise NotLoweredError("a sum over tokens")
    own_dim = sum(not axis for axis in block.axes[:dim])
    strided = block.own
    sizes, steps = (
        tuple(each[:own_dim] + each[own_dim + 1 :]) for each in (strided.sizes, strided.steps)
    )
    count = strided.sizes[own_dim]
    step = strided.steps[own_dim]
    if not 1 <= count <= MAX_ADDED:
        raise NotLoweredError(f"a sum of {count} numbers that lie apart")
    total = Strided(strided.value, sizes, steps, strided.offset)
    for index in range(1, count):
        result = low.value(
            sizes, out.dtype if code == Code.SUM and index == count - 1 else torch.float32
        )
        low.emit(
            Code.ADD,
            [total, Strided(strided.value, sizes, steps, strided.offset + index * step)],
            result,
        )
        total = result
    found = Block((*block.axes[:dim], *block.axes[dim + 1 :]), total)
    return [
        found
        if code == Code.SUM
        else combined(low, Code.DIV, (found, low.block(count)), tuple(out.shape), out.dtype)
    ]


def deviation(low: Lowering, event: Event) -> list[Known]:
    """std(x, dim, correction=0) over the last dimension: the root of the mean of squared distances
    from the mean."""
    tensor, dims = event.args[:2]
    block = low.block(tensor)
    (out,) = event.outputs
    if (
        (list(dims) != [tensor.dim() - 1] and list(dims) != [-1])
        or block.axes[-1]
        or event.kwargs.get("correction") != 0
    ):
        raise NotLoweredError(
            "a deviation over something else than all numbers of the last dimension"
        )
    sizes = block.own.sizes
    shape = tuple(tensor.shape)

    def mean_of(numbers: Block) -> Block:
        result = low.value((*sizes[:-1], 1), torch.float32)
        low.emit(
            Code.MEAN,
            [numbers.own],
            replace(result, sizes=sizes, steps=(*result.steps[:-1], 0)),
            keep_last=True,
        )
        return Block(block.axes, result)

    apart = combined(low, Code.SUB, (block, mean_of(block)), shape, torch.float32)
    squares = combined(low, Code.SQUARE, (apart,), shape, torch.float32)
    root = combined(low, Code.SQRT, (mean_of(squares),), (*shape[:-1], 1), out.dtype)
    return [
        root
        if event.kwargs.get("keepdim")
        else Block(block.axes[:-1], replace(root.own, sizes=sizes[:-1], steps=root.own.steps[:-1]))
    ]


def small_products(low: Lowering, event: Event) -> list[Known]:
    """bmm of two small matrices (rows, inner) and (inner, columns) of each token: sums of products,
    in their order, in fp32."""
    first, second = (low.block(tensor) for tensor in event.args)
    (out,) = event.outputs
    if first.axes != ("N", "", "") or second.axes != first.axes:
        raise NotLoweredError("a product of matrices that are not a token's own")
    if (inner := first.own.sizes[1]) > MAX_ADDED:
        raise NotLoweredError(f"a product of a token's matrices over {inner} numbers")
    found: Block | None = None
    for index in range(inner):
        pair = _column(first, 1, index), _column(second, 0, index)
        is_last = index == inner - 1
        dtype = out.dtype if is_last and found is None else torch.float32
        product = combined(low, Code.MUL, pair, tuple(out.shape), dtype)
        dtype = out.dtype if is_last else torch.float32
        found = (
            product
            if found is None
            else combined(low, Code.ADD, (found, product), tuple(out.shape), dtype)
        )
    assert found is not None
    return [found]


def _column(matrix: Block, own_dim: int, index: int) -> Block:
    """One column (`own_dim` 1) or row (0) of each token's matrix, as a matrix."""
    strided = matrix.own
    sizes = tuple(1 if each == own_dim else size for each, size in enumerate(strided.sizes))
    return replace(
        matrix,
        own=replace(strided, sizes=sizes, offset=strided.offset + index * strided.steps[own_dim]),
    )


def normed(code: Code, low: Lowering, event: Event) -> list[Known]:
    """Layer norm and RMS norm: (x, normalised shape, weight, bias or not, epsilon) -> x and what
    only training looks at."""
    tensor, shape, weight, *rest = event.args
    epsilon = rest[-1]
    others = [weight, *rest[:-1]]
    block = low.block(tensor)
    if len(shape) != 1 or block.axes[-1] or epsilon is None:
        raise NotLoweredError("a norm over several dimensions")
    rows = block.own.sizes[:-1]
    cols = block.own.sizes[-1]
    if code == Code.LAYER_NORM:
        others = [1.0 if others[0] is None else others[0], 0.0 if others[1] is None else others[1]]
    inputs = [block.own]
    for other in others:
        if other is not None:
            strided = low.block(other).own
            step = 0 if strided.count == 1 else strided.steps[-1]
            inputs.append(
                Strided(strided.value, (*rows, cols), (*(0 for _ in rows), step), strided.offset)
            )
    result = low.value((*rows, cols), event.outputs[0].dtype)
    low.emit(code, inputs, result, (epsilon,), keep_last=True)
    return [Block(block.axes, result)] * len(event.outputs)


def softmax(low: Lowering, event: Event) -> list[Known]:
    """softmax(x, dim, half to float)"""
    tensor, dim, _ = event.args
    block = low.block(tensor)
    if dim % tensor.dim() != tensor.dim() - 1 or block.axes[-1]:
        raise NotLoweredError("a softmax over something else than the last dimension")
    result = low.value(block.own.sizes, event.outputs[0].dtype)
    low.emit(Code.SOFTMAX, [block.own], result, keep_last=True)
    return [Block(block.axes, result)]


REDUCING: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    "mean": partial(reducing, Code.MEAN), "sum": partial(reducing, Code.SUM), "softmax": softmax, "_softmax": softmax,
    "std": deviation,
    "native_layer_norm": partial(normed, Code.LAYER_NORM), "_fused_rms_norm": partial(normed, Code.RMS_NORM),
}  # fmt: skip
