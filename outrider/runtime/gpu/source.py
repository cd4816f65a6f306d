"""The source of a Triton kernel that does a phase of tokenwise operations: one program for each
token.

Every operation works on a tile of rows x columns, padded to powers of two. A result stays in
registers for operations that look at it in the same way; others read it from memory behind a
barrier. Chains that share no value run in programs of their own. Numbers are fp32 in between,
rounded to the value's dtype after every operation, as in `tests/reference_run.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.gpu.value_offsets import ValueOffset
from outrider.runtime.gpu.writer import ELEMENTWISE, KNOWN, SPLIT, Argument, Writer
from outrider.runtime.ops import Code, Op, Program

MAX_TILE = 1 << 16  # numbers of one tile


@dataclass(frozen=True)
class KernelText:
    """A kernel's body, which does not say whose it is, and what this phase gives to it."""

    text: str
    arguments: tuple[Argument, ...]
    stored: frozenset[int]  # values that it writes to memory
    programs: int  # for each token
    columns: int  # > 0: its programs are this many columns, split
    tile: int  # numbers of the largest tile


def kernel_text(
    ops: Sequence[Op], program: Program, offsets: Mapping[int, ValueOffset], wanted: Collection[int]
) -> KernelText:
    """The kernel of one tokenwise phase; `wanted`: values that others read. Raises NotLoweredError
    for an operation it lacks."""
    for op in ops:
        if op.code not in KNOWN:
            raise NotLoweredError(f"operation {op.code.name.lower()} on a CUDA device")
    ops = [op for op in ops if op.code != Code.SIGNAL]
    chains = _chains(ops)
    needed = set(wanted)
    while True:  # what must lie in memory is known when all of it is written
        writer = Writer(program, offsets, needed)
        bodies = [writer.chain(chain, number) for number, chain in enumerate(chains)]
        if writer.missed <= needed:
            break
        needed |= writer.missed
    columns = _split(ops, writer)
    tile = writer.tile
    if columns:
        bodies = [Writer(program, offsets, needed, writer.arguments, split=True).chain(ops, 0)]
        tile = SPLIT
    if tile > MAX_TILE:
        raise NotLoweredError(f"{tile} numbers of a token at once on a CUDA device")
    lines = []
    for number, body in enumerate(bodies):
        if len(bodies) > 1:
            lines.append(f"{'if' if number == 0 else 'elif'} tl.program_id(1) == {number}:")
        lines += [("    " if len(bodies) > 1 else "") + line for line in body]
    stored = frozenset(
        op.output.value for op in ops if op.output is not None and op.output.value in needed
    )
    names = ", ".join(f"p{number}" for number in range(len(writer.arguments)))
    text = "\n".join(
        [f"def kernel(num_columns, num_tokens, {names}):", *("    " + line for line in lines)]
    )
    return KernelText(text, tuple(writer.arguments), stored, len(bodies), columns, tile)


def _chains(ops: Sequence[Op]) -> list[list[Op]]:
    """Operations that share no value that one of them makes, in lists of their own."""
    owner: dict[int, int] = {}
    chains: dict[int, list[Op]] = {}
    outputs = {op.output.value for op in ops if op.output is not None}
    for number, op in enumerate(ops):
        touched = {
            view.value for view in (*op.inputs, *([op.output] if op.output is not None else []))
        } & outputs
        joined = sorted({owner[value] for value in touched if value in owner} | {number})
        chains[number] = [op]
        chains[joined[0]] = sorted(
            (member for chain in joined for member in chains.pop(chain)), key=list(ops).index
        )
        owner.update({value: joined[0] for value, chain in owner.items() if chain in joined})
        owner.update(dict.fromkeys(touched, joined[0]))
    return list(chains.values())


def _split(ops: Sequence[Op], writer: Writer) -> int:
    """Columns, where a wide elementwise phase can be divided among programs; 0 where it cannot."""
    if (
        any(op.code not in ELEMENTWISE or op.output is None for op in ops)
        or writer.barriers
        or not ops
    ):
        return 0
    sizes = {(op.output.rows, op.output.cols) for op in ops if op.output is not None}
    rows, cols = max(sizes)
    return cols if len(sizes) == 1 and rows == 1 and cols > 2 * SPLIT else 0
