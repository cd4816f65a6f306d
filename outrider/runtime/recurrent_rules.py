"""Rules of lowering for recurrent operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.kv.state_slots import StateShape
from outrider.runtime.blocks import Block, Known, NotLoweredError
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code, Op, View
from outrider.runtime.strides import Strided, dense

MAX_WIDTH = 8  # of a convolution (`native/recurrent.h`)
EPSILON = 1e-6  # transformers', of the norms of queries and keys
SILU = ("silu", "swish")


def convolution(low: Lowering, event: Event) -> list[Known]:
    """Each channel of a token with those of the tokens before it."""
    x, weight, bias = event.args
    (out,) = event.outputs
    block = low.block(x)
    (channels, width) = weight.shape
    activation = event.kwargs["activation"]
    if block.axes != ("B", "", "T") or block.own.sizes != (channels,) or width > MAX_WIDTH:
        raise NotLoweredError("a convolution of an unusual shape")
    if activation not in (None, *SILU):
        raise NotLoweredError(f"a convolution with '{activation}' after it")
    result = low.value((channels,), out.dtype)
    state = low.state(
        StateShape((width - 1) * channels, channels * low.dtype(low.flat(block).value).itemsize)
    )
    low.add(
        Op(
            Code.CONVOLUTION,
            (low.flat(block),),
            View(result.value, 1, channels, 0, channels),
            (float(activation in SILU),),
            weight=low.name(weight),
            bias=low.name(bias),
            layer=state,
        )
    )
    return [Block(("B", "", "T"), result)]


def delta_rule(low: Lowering, event: Event) -> list[Known]:
    """Queries read what keys and values left in a state that decays. Without beta values are added
    as they are."""
    query, key, value, decay, *betas = (low.block(tensor) for tensor in event.args)
    if any(
        block.axes[:2] != ("B", "T") or any(block.axes[2:])
        for block in (query, key, value, decay, *betas)
    ):
        raise NotLoweredError("a delta rule over another order of dimensions")
    (key_heads, size) = key.own.sizes
    (heads, value_size) = value.own.sizes
    decays = 1 if len(decay.own.sizes) == 1 else decay.own.sizes[1]
    if query.own.sizes != key.own.sizes or heads % key_heads or decays not in (1, size):
        raise NotLoweredError("a delta rule of an unusual shape")
    if any(beta.own.sizes != (heads,) for beta in betas):
        raise NotLoweredError("a delta rule of an unusual shape")
    types = {low.dtype(block.own.value) for block in (query, key, value)}
    if len(types) > 1:
        raise NotLoweredError("a delta rule of mixed types")
    width = types.pop().itemsize
    record = (key_heads * size + heads * value_size) * width + heads * (
        decays + 1
    ) * torch.float32.itemsize
    state = low.state(StateShape(heads * size * value_size, record))
    result = low.value((heads, value_size), event.outputs[0].dtype)
    parts = [
        (query, (key_heads, size)),
        (key, (key_heads, size)),
        (value, (heads, value_size)),
        (decay, (heads, decays)),
    ]
    parts += [(beta, (heads, 1)) for beta in betas]
    low.add(
        Op(
            Code.DELTA_RULE,
            tuple(_rows(low, block, sizes) for block, sizes in parts),
            View(result.value, heads, value_size, 0, value_size),
            (EPSILON if event.kwargs["norms"] else 0.0,),
            layer=state,
            heads=heads,
            scale=event.kwargs["scale"],
        )
    )
    return [Block(("B", "T", "", ""), result)]


def scan(low: Lowering, event: Event) -> list[Known]:
    """Channels whose states decay by factors of their own and take in a value each."""
    value, step, rates, key, query = event.args
    blocks = [low.block(tensor) for tensor in (value, step, key, query)]
    channels = value.shape[2]
    each = rates.shape[1]
    sizes = [channels, channels, each, each]
    if (
        any(block.axes != ("B", "T", "") for block in blocks)
        or [block.own.count for block in blocks] != sizes
    ):
        raise NotLoweredError("a scan of an unusual shape")
    widths = [low.dtype(block.own.value).itemsize for block in blocks]
    state = low.state(
        StateShape(
            each * channels, sum(w * size for w, size in zip(widths[:3], sizes[:3], strict=True))
        )
    )
    result = low.value((channels,), event.outputs[0].dtype)
    low.add(
        Op(
            Code.SCAN,
            tuple(low.flat(block) for block in blocks),
            View(result.value, 1, channels, 0, channels),
            weight=low.name(rates),
            layer=state,
        )
    )
    return [Block(("B", "T", ""), result)]


def _rows(low: Lowering, block: Block, sizes: tuple[int, int]) -> View:
    """(rows, numbers) of a value that an operation makes."""
    strided: Strided = block.own
    if not low.is_made(strided.value) or (len(strided.sizes) == 2 and strided.steps[1] != 1):
        strided = dense(low.copied(strided).value, strided.sizes)
    return View(strided.value, *sizes, strided.offset, strided.steps[0], 1)


RECURRENT: dict[str, Callable[[Lowering, Event], Sequence[Known]]] = {
    "short_convolution": convolution, "delta_rule": delta_rule, "scan": scan,
}  # fmt: skip
