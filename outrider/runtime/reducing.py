"""Rules of lowering for operations over the numbers of a row: sums, means, norms, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.runtime.blocks import Block, Known, NotLoweredError
from outrider.runtime.events import Event
from outrider.runtime.ops import Code
from outrider.runtime.strides import Strided

if TYPE_CHECKING:
    from outrider.runtime.lower import Lowering


MAX_ADDED = 64  # numbers of a sum that is written out


def reducing(code: Code, low: Lowering, event: Event) -> list[Known]:
    """A mean or sum over the last dimension; over another one a sum is written out."""
    tensor, dims, *keep = event.args
    block, places = low.block(tensor), [dim % tensor.dim() for dim in dims]
    if code == Code.SUM and len(places) == 1 and places[0] < tensor.dim() - 1 and not any(keep):
        return added_up(low, block, places[0], event.outputs[0])
    if places != [tensor.dim() - 1] or block.axes[-1]:
        raise NotLoweredError("a sum over something else than the last dimension")
    rows, cols = block.own.sizes[:-1], block.own.sizes[-1]
    made = low.value((*rows, 1), event.outputs[0].dtype)
    low.emit(code, [block.own], replace(made, sizes=(*rows, cols), steps=(*made.steps[:-1], 0)), keep_last=True)
    if (*keep, False)[0]:
        return [Block(block.axes, made)]
    return [Block(block.axes[:-1], replace(made, sizes=rows, steps=made.steps[:-1]))]


def added_up(low: Lowering, block: Block, dim: int, out: Tensor) -> list[Known]:
    """A sum over a few numbers of each token that lie apart, in their order, in fp32 until the last one."""
    if block.axes[dim]:
        raise NotLoweredError("a sum over tokens")
    place = sum(not axis for axis in block.axes[:dim])
    own = block.own
    sizes, steps = (tuple(each[:place] + each[place + 1 :]) for each in (own.sizes, own.steps))
    count, step = own.sizes[place], own.steps[place]
    if not 1 < count <= MAX_ADDED:
        raise NotLoweredError(f"a sum of {count} numbers that lie apart")
    total = Strided(own.value, sizes, steps, own.offset)
    for index in range(1, count):
        made = low.value(sizes, out.dtype if index == count - 1 else torch.float32)
        low.emit(Code.ADD, [total, Strided(own.value, sizes, steps, own.offset + index * step)], made)
        total = made
    return [Block((*block.axes[:dim], *block.axes[dim + 1 :]), total)]


def normed(code: Code, low: Lowering, event: Event) -> list[Known]:
    """Layer norm and RMS norm: (x, normalised shape, weight, bias or not, epsilon) -> x and what only training looks at."""
    tensor, shape, weight, *rest = event.args
    epsilon, others = rest[-1], [weight, *rest[:-1]]
    block = low.block(tensor)
    if len(shape) != 1 or block.axes[-1] or epsilon is None:
        raise NotLoweredError("a norm over several dimensions")
    rows, cols = block.own.sizes[:-1], block.own.sizes[-1]
    if code == Code.LAYER_NORM:
        others = [1.0 if others[0] is None else others[0], 0.0 if others[1] is None else others[1]]
    inputs = [block.own]
    for other in others:
        if other is not None:
            own = low.block(other).own
            step = 0 if own.count == 1 else own.steps[-1]
            inputs.append(Strided(own.value, (*rows, cols), (*(0 for _ in rows), step), own.offset))
    made = low.value((*rows, cols), event.outputs[0].dtype)
    low.emit(code, inputs, made, (epsilon,), keep_last=True)
    return [Block(block.axes, made)] * len(event.outputs)


def softmax(low: Lowering, event: Event) -> list[Known]:
    """softmax(x, dim, half to float)"""
    tensor, dim, _ = event.args
    block = low.block(tensor)
    if dim % tensor.dim() != tensor.dim() - 1 or block.axes[-1]:
        raise NotLoweredError("a softmax over something else than the last dimension")
    made = low.value(block.own.sizes, event.outputs[0].dtype)
    low.emit(Code.SOFTMAX, [block.own], made, keep_last=True)
    return [Block(block.axes, made)]


REDUCING: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    "mean": partial(reducing, Code.MEAN), "sum": partial(reducing, Code.SUM), "softmax": softmax, "_softmax": softmax,
    "native_layer_norm": partial(normed, Code.LAYER_NORM), "_fused_rms_norm": partial(normed, Code.RMS_NORM),
}  # fmt: skip
