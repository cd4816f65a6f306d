"""A program as plain lists and texts, and back: what a start keeps of lowering for the next one."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from outrider.kv.state_slots import StateShape
from outrider.models.loading.tensor_store import tensor_as_text, tensor_of_text
from outrider.runtime.ops import Code, Op, Program, Source, Value, View

MAX_BYTES = 1 << 20  # of a program's constants that are kept


def written(program: Program) -> dict[str, Any] | None:
    """A program for `read`, without weights and rotary modules; None for one whose constants are
    too large to keep."""
    if sum(constant.nbytes for constant in program.constants.values()) > MAX_BYTES:
        return None
    assert program.logits is not None
    return {
        "values": [
            [value.size, _name(value.dtype), int(value.source), value.name]
            for value in program.values
        ],
        "body": [_op(op) for op in program.body],
        "head": [_op(op) for op in program.head],
        "logits": astuple(program.logits),
        "signals": program.signals,
        "hidden_size": program.hidden_size,
        "states": [list(astuple(state)) for state in program.states],
        "constants": {
            name: tensor_as_text(constant) for name, constant in program.constants.items()
        },
    }


def read(stored: dict[str, Any]) -> Program:
    """The program that `written` wrote down."""
    return Program(
        values=[
            Value(size, getattr(torch, dtype), Source(source), name)
            for size, dtype, source, name in stored["values"]
        ],
        body=[_read_op(op) for op in stored["body"]],
        head=[_read_op(op) for op in stored["head"]],
        logits=View(*stored["logits"]),
        signals=tuple(stored["signals"]),
        hidden_size=stored["hidden_size"],
        states=[StateShape(*state) for state in stored["states"]],
        constants={name: tensor_of_text(text) for name, text in stored["constants"].items()},
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _view(view: View) -> list[int]:
    return [view.value, view.rows, view.cols, view.offset, view.row_step, view.col_step]


def _op(op: Op) -> list[Any]:
    fields = vars(op) | {"code": int(op.code), "inputs": [_view(view) for view in op.inputs]}
    return list((fields | {"output": None if op.output is None else _view(op.output)}).values())


def _read_op(stored: list[Any]) -> Op:
    code, inputs, output, given, *others = stored
    others[-1] = tuple(others[-1])  # the part
    views = tuple(View(*view) for view in inputs)
    return Op(Code(code), views, None if output is None else View(*output), tuple(given), *others)
