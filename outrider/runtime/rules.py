"""Rules of lowering: what each of torch's operations is in the words of `ops.py`. Views have theirs in `views.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from outrider.runtime.blocks import Block, Index, Known, NotLoweredError
from outrider.runtime.ops import Code, Op, View
from outrider.runtime.record import Event
from outrider.runtime.strides import Strided, dense
from outrider.runtime.views import VIEWS

if TYPE_CHECKING:
    from outrider.runtime.lower import Lowering

Rule = Callable[["Lowering", Event], Sequence[Known]]
UNARY = {
    "neg": Code.NEG, "rsqrt": Code.RSQRT, "sqrt": Code.SQRT, "tanh": Code.TANH, "sigmoid": Code.SIGMOID, "silu": Code.SILU,
    "relu": Code.RELU, "reciprocal": Code.RECIPROCAL, "square": Code.SQUARE,
}  # fmt: skip


def same(low: Lowering, event: Event) -> list[Known]:
    return [low.find(event.args[0])]


def to_copy(low: Lowering, event: Event) -> list[Known]:
    """A change of dtype; of the layout alone nothing is left to do."""
    tensor, out = event.args[0], event.outputs[0]
    if tensor.dtype == out.dtype or not tensor.is_floating_point():
        return same(low, event)
    return elementwise(low, Code.COPY, [tensor], out)


def elementwise(low: Lowering, code: Code, operands: Sequence[Any], out: Tensor, numbers: tuple[float, ...] = ()) -> list[Known]:
    """Tensors and plain numbers, broadcast to the shape of `out`."""
    blocks = [low.block(one) for one in operands]
    axes = [""] * out.dim()
    for block in blocks:
        for place, axis in enumerate(block.axes, start=out.dim() - len(block.axes)):
            if axis and axes[place] not in ("", axis):
                raise NotLoweredError("rows combined with tokens")
            axes[place] = axes[place] or axis
    made = low.value([size for size, axis in zip(out.shape, axes, strict=True) if not axis], out.dtype)
    low.emit(code, [_broadcast(block, axes, tuple(out.shape)) for block in blocks], made, numbers)
    return [Block(tuple(axes), made)]


def _broadcast(block: Block, axes: Sequence[str], shape: tuple[int, ...]) -> Strided:
    """The block's own numbers at the sizes of a result with these axes."""
    missing = len(axes) - len(block.axes)
    sizes, steps = [], []
    for place, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        theirs, step, count = (
            ("", 0, 1) if place < missing else
            (block.axes[place - missing], block.steps[place - missing], block.shape[place - missing])
        )  # fmt: skip
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
    if code == Code.ADD and isinstance(first, Tensor) and isinstance(found := low.find(first), Index) and isinstance(second, int):
        return [replace(found, offset=found.offset + second)]
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
    made = low.value(square.own.sizes, event.outputs[0].dtype)
    low.emit(Code.MUL, [square.own, first.own], made)
    return [Block(first.axes, made)]


def gelu(low: Lowering, event: Event) -> list[Known]:
    code = Code.GELU_TANH if event.kwargs.get("approximate") == "tanh" else Code.GELU
    return elementwise(low, code, event.args[:1], event.outputs[0])


def clamp(low: Lowering, event: Event) -> list[Known]:
    bounds = [*event.args[1:], None, None][:2]
    low_bound, high_bound = (event.kwargs.get(name, bound) for name, bound in zip(("min", "max"), bounds, strict=True))
    numbers = (float("-inf") if low_bound is None else low_bound, float("inf") if high_bound is None else high_bound)
    return elementwise(low, Code.CLAMP, event.args[:1], event.outputs[0], numbers)


def reducing(code: Code, low: Lowering, event: Event) -> list[Known]:
    """A mean or sum over the last dimension."""
    tensor, dims, *keep = event.args
    block = low.block(tensor)
    if [dim % tensor.dim() for dim in dims] != [tensor.dim() - 1] or block.axes[-1]:
        raise NotLoweredError("a sum over something else than the last dimension")
    rows, cols = block.own.sizes[:-1], block.own.sizes[-1]
    made = low.value((*rows, 1), event.outputs[0].dtype)
    low.emit(code, [block.own], replace(made, sizes=(*rows, cols), steps=(*made.steps[:-1], 0)), keep_last=True)
    if (*keep, False)[0]:
        return [Block(block.axes, made)]
    return [Block(block.axes[:-1], replace(made, sizes=rows, steps=made.steps[:-1]))]


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


def linear(low: Lowering, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, transposed: bool) -> list[Known]:
    block, names = low.block(x), (low.name(weight), low.name(bias))
    inputs, outputs = weight.shape if transposed else tuple(weight.shape)[::-1]
    if block.axes[-1:] != ("",) or block.own.sizes != (inputs,):
        raise NotLoweredError("a matrix product of a token's parts")
    if not (weight.dtype == x.dtype == out.dtype) or (bias is not None and bias.dtype != x.dtype):
        raise NotLoweredError("a matrix product of mixed types")
    made = low.new(outputs, out.dtype)
    low.add(Op(Code.LINEAR, (low.flat(block),), made, weight=names[0], bias=names[1], transposed=transposed))
    return [Block(block.axes, dense(made.value, (outputs,)))]


def matrix(low: Lowering, event: Event) -> list[Known]:
    """A linear layer that keeps its weights in integers."""
    path, layer, x = event.args
    (out,), block = event.outputs, low.block(x)
    if block.axes[-1:] != ("",) or block.own.sizes != (layer.in_features,):
        raise NotLoweredError("a matrix product of a token's parts")
    if layer.bias is not None and layer.bias.dtype != out.dtype:
        raise NotLoweredError("a matrix product of mixed types")
    made = low.new(layer.out_features, out.dtype)
    low.add(Op(Code.LINEAR, (low.flat(block),), made, weight=low.matrix(path, layer), bias=low.bias(path, layer.bias)))
    return [Block(block.axes, dense(made.value, (layer.out_features,)))]


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


def embedding(low: Lowering, event: Event) -> list[Known]:
    table, index = event.args[:2]
    return looked_up(low, low.name(table), index, event.outputs[0])


def rows(low: Lowering, event: Event) -> list[Known]:
    """Of a table that is kept in integers."""
    path, layer, index = event.args
    return looked_up(low, low.matrix(path, layer), index, event.outputs[0])


def looked_up(low: Lowering, table: str, index: Tensor, out: Tensor) -> list[Known]:
    found = low.find(index)
    if not isinstance(found, Index) or out.dim() != 3:
        raise NotLoweredError("an embedding of something else than tokens or positions")
    made = low.new(out.shape[2], out.dtype)
    low.add(Op(Code.EMBED, (), made, weight=table, layer=found.offset, by_position=found.by_position))
    return [Block(("B", "T", ""), dense(made.value, (out.shape[2],)))]


def rotary(low: Lowering, event: Event) -> list[Known]:
    path, _, positions, *rest = event.args
    if low.find(positions) != Index(by_position=True):
        raise NotLoweredError("rotary embeddings of something else than positions")
    further = (*rest, *(value for _, value in sorted(event.kwargs.items())))
    if any(isinstance(one, Tensor) for one in further):
        raise NotLoweredError("rotary embeddings of further tensors")
    found: list[Known] = []
    for which, out in enumerate(event.outputs):
        value = low.rotary((path, further, which), path, further, which, out)
        found.append(Block(("B", "T", ""), dense(value, (out.shape[2],))))
    return found


def attention(low: Lowering, event: Event) -> list[Known]:
    query, key, value = (low.block(tensor) for tensor in event.args)
    if any(block.axes != ("B", "", "T", "") for block in (query, key, value)):
        raise NotLoweredError("attention over another order of dimensions")
    told, (heads, size) = event.kwargs, query.own.sizes
    for block, is_value in ((key, False), (value, True)):
        low.add(Op(Code.STORE, (_by_head(low, block),), None, layer=told["layer"], is_value=is_value))
    value_size = value.own.sizes[1]
    sizes = (heads, value_size)
    made = low.value(sizes, event.outputs[0].dtype)
    low.add(
        Op(
            Code.ATTENTION, (_by_head(low, query),), View(made.value, heads, value_size, 0, value_size),
            layer=told["layer"], heads=heads,
            scale=size**-0.5 if told["scaling"] is None else float(told["scaling"]),
            softcap=float(told["softcap"] or 0.0), window=int(told["window"] or 0),
        )
    )  # fmt: skip
    return [Block(("B", "T", "", ""), made)]


def _by_head(low: Lowering, block: Block) -> View:
    """(heads, size), each head one stretch."""
    own = block.own
    if own.steps[1] != 1 or not low.is_made(own.value):
        own = dense(low.copied(own).value, own.sizes)
    heads, size = own.sizes
    return View(own.value, heads, size, own.offset, own.steps[0])


RULES: dict[str, Rule] = {
    **VIEWS,
    **{name: partial(unary, code) for name, code in UNARY.items()},
    "_to_copy": to_copy, "alias": same, "detach": same, "clone": same, "contiguous": same, "lift_fresh": same,
    "add": partial(binary, Code.ADD), "sub": partial(binary, Code.SUB), "mul": partial(binary, Code.MUL),
    "div": partial(binary, Code.DIV), "rsub": reversed_difference, "pow": power, "gelu": gelu, "clamp": clamp,
    "mean": partial(reducing, Code.MEAN), "sum": partial(reducing, Code.SUM),
    "native_layer_norm": partial(normed, Code.LAYER_NORM), "_fused_rms_norm": partial(normed, Code.RMS_NORM),
    "mm": mm, "addmm": addmm, "linear": plain_linear, "embedding": embedding,
    "matrix": matrix, "rows": rows, "rotary": rotary, "attention": attention,
}  # fmt: skip
