"""Rules of lowering for operations that only look at numbers otherwise, or put them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from torch import Tensor

from outrider.runtime.blocks import SIZES, Block, Complex, Folded, Index, Known, NotLoweredError
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code
from outrider.runtime.strides import Strided, dense, reshape


def view(low: Lowering, event: Event) -> list[Known]:
    """Another shape: dimensions of rows and tokens are found by the sizes before them, so one's own
    never mix with those."""
    found = low.find(event.args[0])
    (out,) = event.outputs
    if isinstance(found, Index) and out.shape == event.args[0].shape:
        return [found]
    block = found.block if isinstance(found, Folded) else low.block(event.args[0])
    folded = (
        SIZES["N"] * block.own.count // out.shape[-1]
        if out.dim() == 2 and block.axes[:2] == ("B", "T")
        else 0
    )
    if folded > SIZES["N"] and out.shape[0] == folded:
        return [Folded(block)]
    axes = _regrouped(block, tuple(out.shape))
    sizes = [size for size, axis in zip(out.shape, axes, strict=True) if not axis]
    reshaped = reshape(block.own, sizes)
    if reshaped is None:
        reshaped = dense(low.copied(block.own).value, sizes)
    return [Block(axes, reshaped)]


def _regrouped(block: Block, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The axes of a block's numbers in this shape."""
    block = _picked(
        block, [dim for dim, size in enumerate(block.shape) if size > 1 or block.axes[dim]]
    )
    axes: list[str] = []
    own_dim = 0
    for size in shape:
        if len(axes) < len(shape) and own_dim < len(block.axes) and block.axes[own_dim]:
            axis = block.axes[own_dim]
            if size == SIZES[axis]:
                axes.append(axis)
                own_dim += 1
                continue
            if (
                axis == "B"
                and block.axes[own_dim + 1 : own_dim + 2] == ("T",)
                and size == SIZES["N"]
            ):
                axes.append("N")
                own_dim += 2
                continue
            if axis == "N" and size == SIZES["B"]:
                axes.append("B")
                block = replace(
                    block, axes=(*block.axes[:own_dim], "T", *block.axes[own_dim + 1 :])
                )
                continue
            if size != 1:
                raise NotLoweredError("a shape that mixes tokens")
        axes.append("")
        while (
            own_dim < len(block.axes)
            and not block.axes[own_dim]
            and _done(block, own_dim, shape, axes)
        ):
            own_dim += 1
    if any(block.axes[own_dim:]):
        raise NotLoweredError("a shape that mixes tokens")
    return tuple(axes)


def _done(block: Block, own_dim: int, shape: tuple[int, ...], axes: Sequence[str]) -> bool:
    """Whether the dimensions so far hold all numbers of the block's dimensions up to this one."""
    return prod(shape[: len(axes)]) >= prod(block.shape[: own_dim + 1]) and any(
        block.axes[own_dim + 1 :]
    )


def permute(low: Lowering, event: Event) -> list[Known]:
    tensor = event.args[0]
    order = list(range(tensor.dim()))
    if event.name == "transpose":
        first = event.args[1] % tensor.dim()
        second = event.args[2] % tensor.dim()
        order[first], order[second] = second, first
    elif event.name == "t":
        order.reverse()
    else:
        order = [dim % tensor.dim() for dim in event.args[1]]
    block = low.block(tensor)
    return [_picked(block, order)]


def _picked(block: Block, order: Sequence[int]) -> Block:
    """These of its dimensions, in this order."""
    own_dims = [own_dim for own_dim, axis in enumerate(block.axes) if not axis]
    dims = [own_dims.index(dim) for dim in order if not block.axes[dim]]
    sizes, steps = (tuple(each[i] for i in dims) for each in (block.own.sizes, block.own.steps))
    return Block(
        tuple(block.axes[dim] for dim in order),
        Strided(block.own.value, sizes, steps, block.own.offset),
    )


def _copies(low: Lowering, event: Event) -> list[Known] | None:
    """Token ids or positions (copies, rows, tokens), all copies alike, of which an operation makes
    or takes some."""
    tensor = event.args[0]
    block = low.find(event.args[0])
    if not isinstance(block, Index):
        return None
    (out,) = event.outputs
    if event.name == "expand":
        leads = tensor.shape == out.shape[out.dim() - tensor.dim() :] or tensor.dim() > 2
    else:
        leads = event.args[1] % max(tensor.dim(), out.dim()) <= max(tensor.dim(), out.dim()) - 3
    if not leads or tuple(out.shape[-2:]) != (SIZES["B"], SIZES["T"]):
        raise NotLoweredError("a part of the token ids or positions")
    return [block]


def unsqueeze(low: Lowering, event: Event) -> list[Known]:
    if (copies := _copies(low, event)) is not None:
        return copies
    tensor = event.args[0]
    (out,) = event.outputs
    dim = event.args[1] % out.dim()
    block = low.find(tensor)
    if isinstance(block, Complex):
        return [Complex(_widened(block.pairs, dim))]
    return [_widened(low.block(tensor), dim)]


def squeeze(low: Lowering, event: Event) -> list[Known]:
    tensor, dims = event.args
    gone = [dim % tensor.dim() for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    block = low.block(tensor)
    kept = [dim for dim in range(tensor.dim()) if dim not in gone or block.shape[dim] != 1]
    if any(block.axes[dim] for dim in range(tensor.dim()) if dim not in kept):
        raise NotLoweredError("a shape without its rows or tokens")
    return [_picked(block, kept)]


def expand(low: Lowering, event: Event) -> list[Known]:
    tensor = event.args[0]
    (out,) = event.outputs
    found = low.find(tensor)
    if tensor.shape == out.shape:
        return [found]
    if (copies := _copies(low, event)) is not None:
        return copies
    block = low.block(tensor)
    missing = out.dim() - tensor.dim()
    axes = ("",) * missing + block.axes
    sizes = [size for size, axis in zip(out.shape, axes, strict=True) if not axis]
    steps = [0] * missing + [
        0 if size == 1 else step
        for size, step in zip(block.own.sizes, block.own.steps, strict=True)
    ]
    return [Block(axes, Strided(block.own.value, tuple(sizes), tuple(steps), block.own.offset))]


def repeat(low: Lowering, event: Event) -> list[Known]:
    """repeat(x, times): along dimensions of size 1 or new ones nothing is copied."""
    tensor, times = event.args
    missing = len(times) - tensor.dim()
    if not any(
        count > 1 and own_dim >= missing and tensor.shape[own_dim - missing] > 1
        for own_dim, count in enumerate(times)
    ):
        return expand(low, event)
    block = low.block(tensor)
    if missing or any(count > 1 for count, axis in zip(times, block.axes, strict=True) if axis):
        raise NotLoweredError("tokens put side by side with themselves")
    sizes = []
    steps = []
    for count, size, step in zip(
        [n for n, axis in zip(times, block.axes, strict=True) if not axis],
        block.own.sizes,
        block.own.steps,
        strict=True,
    ):
        sizes += [count, size]
        steps += [0, step]
    result = low.copied(replace(block.own, sizes=tuple(sizes), steps=tuple(steps)))
    own = [size for size, axis in zip(event.outputs[0].shape, block.axes, strict=True) if not axis]
    return [Block(block.axes, dense(result.value, own))]


def cut(low: Lowering, event: Event) -> list[Known]:
    """slice(tensor, dim, start, end, step)"""
    tensor, *options = event.args
    dim, start, _, step = (options + [0, 0, None, 1][len(options) :])[:4]
    block = low.find(tensor)
    dim %= tensor.dim()
    if tensor.shape == event.outputs[0].shape:
        return [block]
    if (copies := _copies(low, event)) is not None:
        return copies
    return [
        _part(
            low.block(tensor),
            dim,
            (start or 0) % max(tensor.shape[dim], 1),
            event.outputs[0].shape[dim],
            step,
        )
    ]


def _part(block: Block, dim: int, start: int, count: int, step: int = 1) -> Block:
    if block.axes[dim]:
        raise NotLoweredError("some of the tokens")
    own_dim = sum(not axis for axis in block.axes[:dim])
    sizes = list(block.own.sizes)
    steps = list(block.own.steps)
    offset = block.own.offset + start * steps[own_dim]
    sizes[own_dim], steps[own_dim] = count, steps[own_dim] * step
    return Block(block.axes, Strided(block.own.value, tuple(sizes), tuple(steps), offset))


def select(low: Lowering, event: Event) -> list[Known]:
    if (copies := _copies(low, event)) is not None:
        return copies
    tensor, dim, index = event.args
    dim %= tensor.dim()
    block = _part(low.block(tensor), dim, index % tensor.shape[dim], 1)
    return [_picked(block, [each for each in range(tensor.dim()) if each != dim])]


def split(low: Lowering, event: Event) -> list[Known]:
    tensor, _, dim = (*event.args, 0)[:3]
    dim %= tensor.dim()
    block = low.block(tensor)
    start = 0
    pieces = []
    for out in event.outputs:
        pieces.append(_part(block, dim, start, out.shape[dim]))
        start += out.shape[dim]
    return list(pieces)


def unbind(low: Lowering, event: Event) -> list[Known]:
    tensor, dim = (*event.args, 0)[:2]
    dim %= tensor.dim()
    block = low.block(tensor)
    rest = [each for each in range(tensor.dim()) if each != dim % tensor.dim()]
    return [_picked(_part(block, dim, index, 1), rest) for index in range(len(event.outputs))]


def cat(low: Lowering, event: Event) -> list[Known]:
    """Parts side by side, or (stack) along a new dimension."""
    tensors, dim = (*event.args, 0)[:2]
    (out,) = event.outputs
    dim %= out.dim()
    blocks = [low.block(tensor) for tensor in tensors]
    if event.name == "stack":
        blocks = [_widened(block, dim) for block in blocks]
    axes = blocks[0].axes
    if any(block.axes != axes for block in blocks) or axes[dim]:
        raise NotLoweredError("tokens put side by side")
    sizes = [size for size, axis in zip(out.shape, axes, strict=True) if not axis]
    own_dim = sum(not axis for axis in axes[:dim])
    # indices are numbers, too
    result = low.value(
        sizes, out.dtype if out.is_floating_point() else low.dtype(blocks[0].own.value)
    )
    offset = 0
    for block in blocks:
        low.emit(Code.COPY, [block.own], replace(result, sizes=block.own.sizes, offset=offset))
        offset += block.own.sizes[own_dim] * result.steps[own_dim]
    return [Block(axes, result)]


def opened(low: Lowering, event: Event) -> list[Known]:
    """new_empty(x, sizes): memory to be filled part by part, for the tokens of `x`."""
    (out,) = event.outputs
    block = low.block(event.args[0])
    if out.shape[:-1] != event.args[0].shape[:-1] or block.axes[-1]:
        raise NotLoweredError("memory of another shape than its model's")
    sizes = [size for size, axis in zip(out.shape, block.axes, strict=True) if not axis]
    return [Block(block.axes, low.opened(sizes, out.dtype))]


def fill(low: Lowering, event: Event) -> list[Known]:
    """copy_(part, numbers): what was opened is written, here once and before it is read."""
    if is_same_view(*event.args[:2]):  # what `x[1:] += y` ends with
        return [low.find(event.args[1])]
    part = low.block(event.args[0])
    numbers = low.block(event.args[1])
    if part.axes != numbers.axes or part.own.sizes != numbers.own.sizes:
        raise NotLoweredError("numbers copied to others of another shape")
    low.fill(part.own)
    low.emit(Code.COPY, [numbers.own], part.own)
    return [part]


def is_same_view(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same numbers in memory."""
    return (first.data_ptr(), first.shape, first.stride()) == (
        second.data_ptr(),
        second.shape,
        second.stride(),
    )


def _widened(block: Block, dim: int) -> Block:
    own_dim = sum(not axis for axis in block.axes[:dim])
    sizes = list(block.own.sizes)
    steps = list(block.own.steps)
    sizes.insert(own_dim, 1)
    steps.insert(own_dim, 0)
    widened = replace(block.own, sizes=tuple(sizes), steps=tuple(steps))
    return Block((*block.axes[:dim], "", *block.axes[dim:]), widened)


VIEWS: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    "view": view, "_unsafe_view": view, "reshape": view, "_reshape_alias": view, "transpose": permute, "permute": permute,
    "t": permute, "unsqueeze": unsqueeze, "squeeze": squeeze, "expand": expand, "repeat": repeat, "slice": cut, "select": select,
    "split": split, "split_with_sizes": split, "chunk": split, "unbind": unbind, "cat": cat, "stack": cat,
    "new_empty": opened, "copy_": fill,
}  # fmt: skip
