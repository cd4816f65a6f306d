"""Rules of lowering for what routers choose: the largest of a row's numbers, numbers at indices,
and numbers put there.

An index is a number of the token like any other, in fp32, which holds the indices of any row
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.blocks import Block, Known, NotLoweredError
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code, Op, View
from outrider.runtime.strides import collapse, dense

INDICES = torch.float32


def top(low: Lowering, event: Event) -> list[Block]:
    """topk(x, k, dim, largest, sorted): the numbers and their indices, sorted in any case."""
    tensor, count = event.args[:2]
    dim, largest = (*event.args[2:], *(-1, True)[len(event.args[2:]) :])[:2]
    block = _last(low, tensor, dim)
    if not largest:
        raise NotLoweredError("the smallest numbers")
    rows = _rows(low, block)
    sizes = (*block.own.sizes[:-1], count)
    indices = low.value(sizes, INDICES)
    numbers = low.value(sizes, event.outputs[0].dtype)
    picked = View(indices.value, rows.rows, count, 0, count)
    low.add(Op(Code.TOP, (rows,), picked, (float(rows.cols),)))
    low.add(
        Op(
            Code.TAKE,
            (rows, picked),
            View(numbers.value, rows.rows, count, 0, count),
            (float(rows.cols),),
        )
    )
    return [Block(block.axes, numbers), Block(block.axes, indices)]


def largest(low: Lowering, event: Event) -> list[Known]:
    """max(x, dim, keepdim): the largest number of a row and its index; of equals the lowest index."""
    tensor, dim, keeps = (*event.args, False)[:3]
    if not isinstance(dim, int):
        raise NotLoweredError("the larger of two tensors' numbers")
    numbers, indices = top(low, replace(event, args=(tensor, 1, dim)))
    if keeps:
        return [numbers, indices]
    return [
        Block(
            block.axes[:-1],
            replace(block.own, sizes=block.own.sizes[:-1], steps=block.own.steps[:-1]),
        )
        for block in (numbers, indices)
    ]


def take(low: Lowering, event: Event) -> list[Known]:
    """gather(x, dim, index)"""
    tensor, dim, index = event.args[:3]
    block = _last(low, tensor, dim)
    indices = low.block(index)
    _check(block, indices)
    result = low.value(indices.own.sizes, event.outputs[0].dtype)
    rows = _rows(low, block)
    at = _rows(low, indices)
    low.add(
        Op(
            Code.TAKE,
            (rows, at),
            View(result.value, at.rows, at.cols, 0, at.cols),
            (float(rows.cols),),
        )
    )
    return [Block(indices.axes, result)]


def reorder(low: Lowering, event: Event) -> list[Known]:
    """index_select(x, dim, index) with indices that are a constant of the model."""
    tensor, dim, index = event.args
    block = _last(low, tensor, dim)
    indices = low.block(index)
    if any(indices.axes) or len(block.own.sizes) != 1:
        raise NotLoweredError("a choice among other numbers than a row's")
    result = low.value(indices.own.sizes, event.outputs[0].dtype)
    rows = _rows(low, block)
    at = _rows(low, indices)
    low.add(
        Op(Code.TAKE, (rows, at), View(result.value, 1, at.cols, 0, at.cols), (float(rows.cols),))
    )
    return [Block(block.axes, result)]


def put(low: Lowering, event: Event) -> list[Known]:
    """scatter(x, dim, index, numbers or one number)"""
    tensor, dim, index, source = event.args[:4]
    block = _last(low, tensor, dim)
    indices = low.block(index)
    _check(block, indices)
    if event.kwargs or len(event.args) > 4:
        raise NotLoweredError("numbers put together with those that are there")
    rows = _rows(low, block)
    at = _rows(low, indices)
    if isinstance(source, Tensor) and source.dim():
        numbers = low.block(source)
        if numbers.axes != indices.axes or numbers.own.sizes != indices.own.sizes:
            raise NotLoweredError("more numbers to put than indices")
        new = _rows(low, numbers)
    else:
        new = View(low.block(source).own.value, at.rows, at.cols, 0, 0, 0)
    result = low.value(block.own.sizes, event.outputs[0].dtype)
    low.add(
        Op(
            Code.PUT,
            (rows, at, new),
            View(result.value, rows.rows, rows.cols, 0, rows.cols),
            (float(at.cols),),
        )
    )
    return [Block(block.axes, result)]


def _last(low: Lowering, tensor: Tensor, dim: Any) -> Block:
    block = low.block(tensor)
    if dim % tensor.dim() != tensor.dim() - 1 or block.axes[-1]:
        raise NotLoweredError("a choice along something else than the last dimension")
    return block


def _check(block: Block, indices: Block) -> None:
    if block.axes != indices.axes or block.own.sizes[:-1] != indices.own.sizes[:-1]:
        raise NotLoweredError("a choice among other numbers than a row's")


def _rows(low: Lowering, block: Block) -> View:
    """All numbers, the last dimension in a row."""
    collapsed = collapse([block.own], keep_last=True)
    if collapsed is None:
        collapsed = collapse([dense(low.copied(block.own).value, block.own.sizes)], keep_last=True)
    assert collapsed is not None
    return collapsed[0]


CHOICES: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    "topk": top, "max": largest, "gather": take, "index_select": reorder, "scatter": put,
}  # fmt: skip
