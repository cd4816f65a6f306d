"""Which positions the cache keeps of layers with windows, by the program that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.kv import LayerShape
from outrider.models.lm import LM
from outrider.runtime.ops import Code, Program


def kept_layers(
    layers: Sequence[LayerShape], program: Program, context_length: int
) -> tuple[LayerShape, ...]:
    """The layers with the widest window that anything of the program reads of each; none where that
    reaches over the context."""
    reads: dict[int, list[int]] = {}
    for op in program.body:
        if op.code == Code.ATTENTION:
            reads.setdefault(op.layer, []).append(op.window or context_length)
    widest = [max(reads.get(layer, [context_length])) for layer in range(len(layers))]
    return tuple(
        replace(shape, window=window if window < context_length else None)
        for shape, window in zip(layers, widest, strict=True)
    )


def within(program: Program, window: int | None) -> Program:
    """The program, where no token sees more than the last `window` positions; None: as it is."""
    if window is None:
        return program
    body = [
        replace(op, window=min(op.window or window, window)) if op.code == Code.ATTENTION else op
        for op in program.body
    ]
    return replace(program, body=body)


def keep_windows(lm: LM, program: Program) -> None:
    """Let the cache hold what this program reads of it. It is empty, before and after.

    The executor, and our kernels on a device, know a position apart from its place, so that sums
    keep their order. For torch's kernels `models/probes/probe.py` chooses the layers.
    """
    lm.lay_out(kept_layers(lm.shape.layers, program, lm.shape.context_length))
