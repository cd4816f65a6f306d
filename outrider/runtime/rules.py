"""Rules of lowering: what each of torch's operations is in the words of `ops.py`. Those of a kind
are in files of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from outrider.models.gguf.linear import BlockExperts
from outrider.runtime.blocks import Block, Index, Known, NotLoweredError, Unknown
from outrider.runtime.choices import CHOICES, INDICES
from outrider.runtime.complex_numbers import COMPLEX
from outrider.runtime.elementwise import ELEMENTWISE
from outrider.runtime.events import Event
from outrider.runtime.indices import INDICES as INDEX_RULES
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code, Op, View
from outrider.runtime.products import PRODUCTS
from outrider.runtime.recurrent_rules import RECURRENT
from outrider.runtime.reducing import REDUCING
from outrider.runtime.strides import dense, stretch
from outrider.runtime.views import VIEWS

Rule = Callable[["Lowering", Event], Sequence[Known]]


def same(low: Lowering, event: Event) -> list[Known]:
    return [low.find(event.args[0])]


def embedding(low: Lowering, event: Event) -> list[Known]:
    table, index = event.args[:2]
    return looked_up(low, low.name(table), index, event.outputs[0])


def rows(low: Lowering, event: Event) -> list[Known]:
    """Rows of a table that is kept in integers."""
    path, layer, index = event.args
    return looked_up(low, low.matrix(path, layer), index, event.outputs[0])


def looked_up(low: Lowering, table: str, index: Tensor, out: Tensor) -> list[Known]:
    block = low.find(index)
    if not isinstance(block, Index) or out.dim() != 3:
        raise NotLoweredError("an embedding of something else than tokens or positions")
    result = low.new(out.shape[2], out.dtype)
    low.add(
        Op(
            Code.EMBED,
            (),
            result,
            weight=table,
            layer=block.offset,
            by_position=block.by_position,
            bound=block.bound or 0,
        )
    )
    return [Block(("B", "T", ""), dense(result.value, (out.shape[2],)))]


def rotary(low: Lowering, event: Event) -> list[Known]:
    path, _, positions, *rest = event.args
    if low.find(positions) != Index(by_position=True):
        raise NotLoweredError("rotary embeddings of something else than positions")
    further = (*rest, *(value for _, value in sorted(event.kwargs.items())))
    if any(isinstance(table_, Tensor) for table_ in further):
        raise NotLoweredError("rotary embeddings of further tensors")
    embeddings: list[Known] = []
    for which, out in enumerate(event.outputs):
        value = low.rotary((path, further, which), path, further, which, out)
        embeddings.append(Block(("B", "T", ""), dense(value, (out.shape[2],))))
    return embeddings


def store(low: Lowering, event: Event) -> list[Known]:
    """Keys are put into the cache, and values unless they are in the keys."""
    stored = _by_heads(low, event)
    for block, is_value in zip(stored, (False, True)[: len(stored)], strict=True):
        low.add(
            Op(
                Code.STORE,
                (_by_head(low, block),),
                None,
                layer=event.kwargs["layer"],
                is_value=is_value,
            )
        )
    return []


def _by_heads(low: Lowering, event: Event) -> list[Block]:
    """The inputs of attention, head by head."""
    blocks = [low.block(tensor) for tensor in event.args]
    if any(block.axes != ("B", "", "T", "") for block in blocks):
        raise NotLoweredError("attention over another order of dimensions")
    return blocks


def choice(low: Lowering, event: Event) -> list[Known]:
    """The positions that an indexer chooses for each token; its keys are put into the cache."""
    query, key, weights = (low.block(tensor) for tensor in event.args)
    if [block.axes for block in (query, key, weights)] != [
        ("B", "T", "", ""),
        ("B", "T", ""),
        ("B", "T", ""),
    ]:
        raise NotLoweredError("an indexer over another order of dimensions")
    layer = event.kwargs["layer"]
    (heads, _) = query.own.sizes
    count = event.kwargs["count"]
    low.add(Op(Code.STORE, (low.flat(key),), None, layer=layer))
    result = low.value((count,), INDICES)
    low.add(
        Op(
            Code.CHOICE,
            (_by_head(low, query), low.flat(weights)),
            View(result.value, 1, count, 0, count),
            layer=layer,
            heads=heads,
            scale=event.kwargs["scale"],
        )
    )
    return [Block(("B", "T", ""), result)]


def attention(low: Lowering, event: Event) -> list[Known]:
    query, _, value = _by_heads(low, event)
    store(low, replace(event, args=event.args[1 : 2 if event.kwargs["values_in_keys"] else 3]))
    options = event.kwargs
    (heads, size) = query.own.sizes
    value_size = value.own.sizes[1]
    sizes = (heads, value_size)
    result = low.value(sizes, event.outputs[0].dtype)
    sinks = () if options["sinks"] is None else (_sinks(low, options["sinks"], heads),)
    chosen = () if options["chosen"] is None else (low.flat(low.block(options["chosen"])),)
    if chosen and (options["window"] or options["sees_all"] or options["slopes"] is not None):
        raise NotLoweredError("a choice of positions together with a window or slopes")
    low.add(
        Op(
            Code.ATTENTION,
            (_by_head(low, query), *chosen, *sinks),
            View(result.value, heads, value_size, 0, value_size),
            layer=options["layer"],
            heads=heads,
            scale=size**-0.5 if options["scaling"] is None else float(options["scaling"]),
            softcap=float(options["softcap"] or 0.0),
            window=int(options["window"] or 0),
            sees_all=options["sees_all"],
            weight=low.name(options["slopes"]),
            chosen=sum(position.cols for position in chosen),
        )
    )
    return [Block(("B", "T", "", ""), result)]


def _sinks(low: Lowering, sinks: Tensor, heads: int) -> View:
    """A score for each head, which is a constant of the model."""
    strided = low.block(sinks).own
    if low.is_made(strided.value) or strided.sizes != (heads,):
        raise NotLoweredError("attention sinks that are no constant for each head")
    return View(strided.value, 1, heads, strided.offset, 0, strided.steps[0])


def experts(low: Lowering, event: Event) -> list[Known]:
    """A product of each token with the weights of those experts that it names."""
    x, index, weight, bias = event.args
    (out,) = event.outputs
    block = low.block(x)
    chosen = low.block(index)
    transposed = event.kwargs["transposed"]
    in_blocks = isinstance(weight, BlockExperts)
    if in_blocks:  # (out, in), whichever way transformers' code reads them
        inputs = weight.inputs
        outputs = weight.outputs
        transposed = False
    else:
        inputs, outputs = weight.shape[1:] if transposed else weight.shape[:0:-1]
    if chosen.axes != (*block.axes[:1], "") or block.own.sizes not in (
        (inputs,),
        (*chosen.own.sizes, inputs),
    ):
        raise NotLoweredError("experts of an unusual shape")
    if not (weight.dtype == x.dtype == out.dtype) or (bias is not None and bias.dtype != x.dtype):
        raise NotLoweredError("experts of mixed types")
    rows = chosen.own.count
    flat = low.flat(block)
    result = low.value((rows, outputs), out.dtype)
    low.add(
        Op(
            Code.EXPERTS,
            (
                View(
                    flat.value,
                    rows,
                    inputs,
                    flat.offset,
                    inputs if len(block.own.sizes) == 2 else 0,
                ),
                low.flat(chosen),
            ),
            View(result.value, rows, outputs, 0, outputs),
            weight=low.matrix(event.kwargs["path"], weight) if in_blocks else low.name(weight),
            bias=low.name(bias),
            transposed=transposed,
        )
    )
    return [Block((*chosen.axes, ""), result)]


def heads(low: Lowering, event: Event) -> list[Known]:
    """A product of each head's numbers with its half of a matrix of latent attention."""
    product, x = event.args
    (out,) = event.outputs
    block = low.block(x)
    whole = product.key_size + product.value_size
    is_query = event.kwargs["half"] == "to_latent"
    if block.axes != ("B", "T", "", "") or not x.dtype == product.weight.dtype == out.dtype:
        raise NotLoweredError("a product of heads of an unusual shape or of mixed types")
    result = low.value((product.num_heads, out.shape[3]), out.dtype)
    low.add(
        Op(
            Code.HEADS,
            (_by_head(low, block),),
            View(result.value, product.num_heads, out.shape[3], 0, out.shape[3]),
            weight=low.name(product.weight),
            transposed=is_query,
            heads=product.num_heads,
            part=(0, product.key_size) if is_query else (product.key_size, whole),
        )
    )
    return [Block(block.axes, result)]


def _by_head(low: Lowering, block: Block) -> View:
    """(heads, size), each head one stretch."""
    strided = block.own
    if strided.steps[1] != 1 or not low.is_made(strided.value):
        strided = dense(low.copied(strided).value, strided.sizes)
    heads, size = strided.sizes
    return View(strided.value, heads, size, strided.offset, strided.steps[0])


RULES: dict[str, Rule] = {
    **VIEWS, **ELEMENTWISE, **INDEX_RULES, **COMPLEX, **REDUCING, **CHOICES, **PRODUCTS, **RECURRENT,
    "alias": same, "detach": same, "clone": same, "contiguous": same, "lift_fresh": same,
    "embedding": embedding, "rows": rows, "rotary": rotary, "attention": attention, "store": store, "experts": experts,
    "heads": heads, "choice": choice,
}  # fmt: skip


UNKNOWN = Unknown("a tensor whose memory is written by way of another")


def rewritten(low: Lowering, whole: Known, part: Known | None, result: Known) -> Known:
    """A copy of `whole` with `result` in the place of `part`, which is a stretch of it along one of
    a token's own dimensions."""
    if not (isinstance(whole, Block) and isinstance(part, Block) and isinstance(result, Block)):
        return UNKNOWN
    strided = whole.own
    old = part.own
    if (whole.axes, strided.value, strided.steps) != (
        part.axes,
        old.value,
        old.steps,
    ) or result.axes != whole.axes:
        return UNKNOWN
    if [*old.sizes] == [*strided.sizes] and old.offset == strided.offset:
        return result
    dims = [dim for dim, size in enumerate(strided.sizes) if size != old.sizes[dim]]
    if len(dims) != 1 or not strided.steps[dims[0]]:
        return UNKNOWN
    (dim,) = dims
    start, rest = divmod(old.offset - strided.offset, strided.steps[dim])
    end = start + old.sizes[dim]
    size = strided.sizes[dim]
    if rest or start < 0 or end > size:
        return UNKNOWN
    made = low.value(strided.sizes, low.dtype(strided.value))
    for first, last in ((0, start), (end, size)):
        if first < last:
            low.emit(
                Code.COPY, [stretch(strided, dim, first, last)], stretch(made, dim, first, last)
            )
    low.emit(Code.COPY, [result.own], stretch(made, dim, start, end))
    return Block(whole.axes, made)
