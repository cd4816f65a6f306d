"""The memory of a program's values on a device: which tensor each lies in, and how far apart two
tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.runtime.ops import Code, Op, Program
from outrider.runtime.schedule import Kind, Phase


@dataclass(frozen=True)
class ValueOffset:
    """A value inside a tensor (tokens, width): its first number in a token's line."""

    tensor: int  # the value that gives the tensor its number
    width: int
    offset: int = 0


def joinable(phase: Phase) -> list[list[Op]]:
    """The linear layers of a phase by what they read: those of one list are one product with a
    joined weight."""
    groups: dict[object, list[Op]] = {}
    for number, op in enumerate(phase.ops):
        key = number if op.transposed else (op.inputs[0], bool(op.bias))
        groups.setdefault(key, []).append(op)
    return list(groups.values())


def offsets_of(program: Program, phases: Sequence[Phase]) -> dict[int, ValueOffset]:
    """The offset of every value that is made. What one product gives lies side by side."""
    offsets: dict[int, ValueOffset] = {}
    for phase in phases:
        if phase.kind == Kind.LINEARS:
            for ops in joinable(phase):
                width = sum(op.output.cols for op in ops if op.output is not None)
                offset = 0
                first = ops[0].output
                assert first is not None
                for op in ops:
                    assert op.output is not None
                    offsets[op.output.value] = ValueOffset(first.value, width, offset)
                    offset += op.output.cols
    for op in (*program.body, *program.head):
        if op.output is not None and op.output.value not in offsets:
            offsets[op.output.value] = ValueOffset(
                op.output.value, program.values[op.output.value].size
            )
    return offsets


def read_elsewhere(program: Program, phases: Sequence[Phase]) -> list[frozenset[int]]:
    """For each phase the values that it makes and others read, or that are asked for: these must
    lie in memory."""
    assert program.logits is not None
    readers: dict[int, set[int]] = {program.logits.value: {-1}}
    for number, phase in enumerate(phases):
        for op in phase.ops:
            for view in op.inputs:
                readers.setdefault(view.value, set()).add(-1 if op.code == Code.SIGNAL else number)
    return [
        frozenset(
            op.output.value
            for op in phase.ops
            if op.output is not None and readers.get(op.output.value, set()) - {number}
        )
        for number, phase in enumerate(phases)
    ]
