"""What a tensor is after a part of it was written in place, as in `states[1:] += more`."""

from __future__ import annotations

from outrider.runtime.blocks import Block, Known, Unknown
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import Code
from outrider.runtime.strides import stretch

UNKNOWN = Unknown("a tensor whose memory is written by way of another")


def rewritten(low: Lowering, whole: Known, part: Known | None, result: Known) -> Known:
    """A copy of `whole` with `result` in the place of `part`, which is a stretch of it along one of a token's own dimensions."""
    if not (isinstance(whole, Block) and isinstance(part, Block) and isinstance(result, Block)):
        return UNKNOWN
    own, old = whole.own, part.own
    if (whole.axes, own.value, own.steps) != (part.axes, old.value, old.steps) or result.axes != whole.axes:
        return UNKNOWN
    if [*old.sizes] == [*own.sizes] and old.offset == own.offset:
        return result
    dims = [dim for dim, size in enumerate(own.sizes) if size != old.sizes[dim]]
    if len(dims) != 1 or not own.steps[dims[0]]:
        return UNKNOWN
    (dim,) = dims
    start, rest = divmod(old.offset - own.offset, own.steps[dim])
    end, size = start + old.sizes[dim], own.sizes[dim]
    if rest or start < 0 or end > size:
        return UNKNOWN
    made = low.value(own.sizes, low.dtype(own.value))
    for begin, behind in ((0, start), (end, size)):
        if begin < behind:
            low.emit(Code.COPY, [stretch(own, dim, begin, behind)], stretch(made, dim, begin, behind))
    low.emit(Code.COPY, [result.own], stretch(made, dim, start, end))
    return Block(whole.axes, made)
