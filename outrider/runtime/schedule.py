"""A program in order for the executor: phases that threads share, and an offset in memory for every
value while it is needed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush

from outrider.runtime.ops import RECURRENT, Code, Op, Program, Source, Value

ALIGNMENT = 64  # bytes


class Kind(IntEnum):
    """How threads share a phase; numbered as in `native/program.h`."""

    TOKENWISE = 0
    LINEARS = 1
    ATTENTIONS = 2
    EXPERTS = 3
    RECURRENT = 4


@dataclass(frozen=True)
class Phase:
    """Operations that run without waiting for all threads in between."""

    kind: Kind
    ops: tuple[Op, ...]
    is_head: bool


@dataclass(frozen=True)
class Schedule:
    """Phases in order, and where each value that is made lies: bytes a token, in its section's
    arena."""

    phases: tuple[Phase, ...]
    offsets: dict[int, int]
    in_head: frozenset[int]  # values of the head, the others are the body's
    body_bytes: int
    head_bytes: int


def schedule(program: Program) -> Schedule:
    """Linear layers that do not wait for one another share a phase, and so do operations on single
    tokens."""
    phases = [*_phases(program.body, is_head=False), *_phases(program.head, is_head=True)]
    in_head = frozenset(op.output.value for op in program.head if op.output is not None)
    in_body = frozenset(op.output.value for op in program.body if op.output is not None)
    assert program.logits is not None
    body, body_bytes = _offsets(program, phases, in_body, None)
    head, head_bytes = _offsets(program, phases, in_head, program.logits.value)
    return Schedule(tuple(phases), body | head, in_head, body_bytes, head_bytes)


def _phases(ops: Sequence[Op], *, is_head: bool) -> list[Phase]:
    """Greedily: all operations on single tokens that can be made, then all linear layers that can,
    then one attention or choice, one product of experts or one recurrent operation."""
    waits, followers = _dependencies(ops)
    ready: dict[Kind, list[int]] = {kind: [] for kind in Kind}  # heaps of operations
    for index, count in enumerate(waits):
        if not count:
            heappush(ready[_kind(ops[index])], index)
    phases: list[Phase] = []

    def take(index: int) -> Op:
        for follower in followers[index]:
            waits[follower] -= 1
            if not waits[follower]:
                heappush(ready[_kind(ops[follower])], follower)
        return ops[index]

    while any(ready.values()):
        kind = next(kind for kind in Kind if ready[kind])
        taken: list[Op] = []
        if kind == Kind.TOKENWISE:
            while ready[kind]:
                taken.append(take(heappop(ready[kind])))
        else:
            several = sorted(ready[kind]) if kind == Kind.LINEARS else ready[kind][:1]
            ready[kind] = [index for index in ready[kind] if index not in several]
            heapify(ready[kind])
            taken += [take(index) for index in several]
        phases.append(Phase(kind, tuple(taken), is_head))
    return phases


def _kind(op: Op) -> Kind:
    kinds = {
        Code.LINEAR: Kind.LINEARS,
        Code.ATTENTION: Kind.ATTENTIONS,
        Code.CHOICE: Kind.ATTENTIONS,
        Code.EXPERTS: Kind.EXPERTS,
        Code.HEADS: Kind.EXPERTS,
    }
    return Kind.RECURRENT if op.code in RECURRENT else kinds.get(op.code, Kind.TOKENWISE)


def _dependencies(ops: Sequence[Op]) -> tuple[list[int], list[list[int]]]:
    """How many operations each one waits for, and which ones wait for it. A value may be written
    part by part."""
    writers: dict[int, list[int]] = {}
    stores: dict[int, list[int]] = {}
    waits = [0] * len(ops)
    followers = [list[int]() for _ in ops]
    for index, op in enumerate(ops):
        before = {writer for view in op.inputs for writer in writers.get(view.value, ())}
        if op.code in (Code.ATTENTION, Code.CHOICE):
            before |= set(stores.get(op.layer, ()))
        for one in before:
            followers[one].append(index)
        waits[index] = len(before)
        if op.output is not None:
            writers.setdefault(op.output.value, []).append(index)
        if op.code == Code.STORE:
            stores.setdefault(op.layer, []).append(index)
    return waits, followers


def _offsets(
    program: Program, phases: Sequence[Phase], values: Collection[int], kept_offset: int | None
) -> tuple[dict[int, int], int]:
    """The offsets of these values, and bytes in all: first fit, each from the phase that makes it
    to the last that reads it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, phase in enumerate(phases):
        for op in phase.ops:
            for view in (*op.inputs, *((op.output,) if op.output is not None else ())):
                if view.value in values:
                    first.setdefault(view.value, number)
                    last[view.value] = number
    if kept_offset is not None:
        last[kept_offset] = len(phases)
    taken: dict[int, tuple[int, int]] = {}
    live: list[int] = []
    for value in sorted(first, key=lambda value: first[value]):
        live = [other for other in live if last[other] >= first[value]]
        size = -(-_bytes(program.values[value]) // ALIGNMENT) * ALIGNMENT
        start = 0
        for begin, end in sorted(taken[other] for other in live):
            if begin - start >= size:
                break
            start = max(start, end)
        taken[value] = (start, start + size)
        live.append(value)
    return {value: place[0] for value, place in taken.items()}, max(
        (end for _, end in taken.values()), default=0
    )


def _bytes(value: Value) -> int:
    assert value.source == Source.MADE
    return value.size * value.dtype.itemsize
