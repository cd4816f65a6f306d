"""Whether a program stays inside its memory: checked before it is bound, since the executor looks
at nothing.

A program of our own lowering does. One that an earlier start kept comes from a file, which anybody
may have changed. Every operand must lie in its value's block, every weight have the size that its
operation reads, every layer and state be there, and whatever is read be written before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import NoReturn

import torch
from torch import Tensor

from outrider.kv import LayerShape
from outrider.kv.state_slots import StateShape
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.matrices import Matrix, PackedWeight
from outrider.runtime.ops import RECURRENT, Code, Op, Program, Source, Value, View
from outrider.runtime.recurrent_rules import MAX_WIDTH
from outrider.runtime.structures import WeightFormat

MAX_SIZE = 1 << 24  # numbers of a value
MAX_WINDOW = 1 << 40
DTYPES = (torch.bfloat16, torch.float32)
NO_OUTPUT = frozenset({Code.STORE, Code.SIGNAL})
# of the pass's tokens, not of its rows
OF_BODY = frozenset({Code.ATTENTION, Code.CHOICE, Code.STORE, Code.SIGNAL, *RECURRENT})
OF_TWO = (
    Code.ADD,
    Code.SUB,
    Code.MUL,
    Code.DIV,
    Code.GREATER,
    Code.AT_LEAST,
    Code.EQUAL,
    Code.LARGER,
    Code.SMALLER,
)
OPERANDS = {  # at least and at most; others take one
    Code.EMBED: (0, 0),
    **dict.fromkeys((*OF_TWO, Code.EXPERTS, Code.TAKE, Code.CHOICE), (2, 2)),
    Code.WHERE: (3, 3),
    Code.PUT: (3, 3),
    Code.LAYER_NORM: (1, 3),
    Code.RMS_NORM: (1, 2),
    Code.ATTENTION: (1, 3),
    Code.DELTA_RULE: (4, 5),
    Code.SCAN: (2, 4),
}
NUMBERS = {
    Code.CLAMP: 2,
    Code.SOFTPLUS: 2,
    Code.TOP: 1,
    Code.TAKE: 1,
    Code.PUT: 1,
    Code.CONVOLUTION: 1,
    Code.DELTA_RULE: 1,
}


def check_program(
    program: Program,
    tensors: Mapping[str, Tensor | Matrix | PackedWeight],
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
) -> None:
    """Raises NotLoweredError for a program that would read or write outside its memory.

    `tensors`: its weights and constants by name; `dtype`: of the cache and of signals.
    """
    try:
        _Checker(program, tensors, layers, dtype).check()
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise NotLoweredError(f"a program that is damaged: {error}") from error


class _Checker:
    """One program, its operations in order."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor | Matrix | PackedWeight],
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
    ) -> None:
        self._program = program
        self._tensors = tensors
        self._layers = layers
        self._dtype = dtype
        self._written: set[int] = set()  # values that earlier operations have made
        self._of_body: set[int] = set()  # those of them that the body has made
        self._choices: dict[int, Op] = {}  # what made a value that is nothing but choices
        self._in_head = False

    def check(self) -> None:
        """Raises NotLoweredError, or any error of Python where values are of other types than a
        program's."""
        program = self._program
        _number(program.hidden_size, "hidden size", 0, MAX_SIZE)
        if len({_number(key, "signal", -MAX_SIZE, MAX_SIZE) for key in program.signals}) < len(
            program.signals
        ):
            _refuse("two signals of one key")
        for value in program.values:
            _number(value.size, "size", 0, MAX_SIZE)
            if value.dtype not in DTYPES:
                _refuse(f"a value in {value.dtype}")
            if value.source in (Source.ROTARY, Source.INPUT):
                _number(int(value.name), "table", 0, 1 << 20)
        for state in program.states:
            _number(state.size, "state", 0, MAX_SIZE)
            _number(state.record_bytes, "record", 0, MAX_SIZE)
        for op in program.body:
            self._op(op)
        self._of_body = set(self._written)
        self._in_head = True
        for op in program.head:
            self._op(op)
        if program.logits is None:
            _refuse("no logits")
        logits = program.logits
        if (program.head and logits.value in self._of_body) or logits.value not in self._written:
            _refuse("logits of no row")
        self._fits(logits, 1, logits.cols)

    def _op(self, op: Op) -> None:
        fewest, most = OPERANDS.get(op.code, (1, 1))
        if not fewest <= len(op.inputs) <= most:
            _refuse(f"{len(op.inputs)} operands of {op.code.name}")
        if (op.output is None) != (op.code in NO_OUTPUT):
            _refuse(f"an output of {op.code.name}")
        if (self._in_head and op.code in OF_BODY) or (not self._in_head and op.code == Code.GATHER):
            _refuse(f"{op.code.name} out of its place")
        if len(op.numbers) < NUMBERS.get(op.code, 0) or not all(
            isinstance(each, int | float) for each in op.numbers
        ):
            _refuse(f"numbers of {op.code.name}")
        for name in ("layer", "bound"):
            _number(getattr(op, name), name, 0, MAX_WINDOW)
        for view in op.inputs:
            self._reads(view, from_body=op.code == Code.GATHER)
        first = op.output if op.output is not None else op.inputs[0]
        least = 1 if op.code in _CHECKS else 0
        _number(first.rows, "rows", least, MAX_SIZE)
        _number(first.cols, "columns", least, MAX_SIZE)
        if op.output is not None:
            self._writes(op.output)
        _CHECKS.get(op.code, _Checker._elementwise)(self, op, first)

    # ------------------------------------------------------------ operands

    def _value(self, view: View) -> Value:
        return self._program.values[_number(view.value, "value", 0, len(self._program.values) - 1)]

    def _reads(self, view: View, *, from_body: bool) -> None:
        value = self._value(view)
        if value.source == Source.MADE:
            if view.value not in self._written:
                _refuse("a value that is read before it is made")
            if self._in_head and (view.value in self._of_body) != from_body:
                _refuse("a value of the body in the head, or the other way round")
        elif self._in_head and value.source != Source.CONSTANT:
            _refuse("a value of tokens in the head")

    def _writes(self, view: View) -> None:
        if self._value(view).source != Source.MADE or view.value in self._of_body:
            _refuse("an output that is none")
        self._written.add(view.value)
        self._choices.pop(view.value, None)

    def _fits(self, view: View, rows: int, cols: int, *, is_dense: bool = False) -> None:
        """Refuse an operand whose rows x cols numbers are not all in its block. `is_dense`: they
        are read side by side."""
        value = self._value(view)
        size = value.size
        if value.source == Source.CONSTANT:
            tensor = self._tensor(value.name)
            if (
                tensor.dtype != value.dtype
                or not tensor.is_contiguous()
                or tensor.device.type != "cpu"
            ):
                _refuse(f"the constant '{value.name}' is of another type")
            size = tensor.numel()
        if not rows or not cols:
            return
        steps = [
            _number(step, "step", -MAX_SIZE, MAX_SIZE)
            for step in (view.row_step, 1 if is_dense else view.col_step)
        ]
        spans = [step * (count - 1) for step, count in zip(steps, (rows, cols), strict=True)]
        offset = _number(view.offset, "offset", 0, MAX_SIZE)
        if (
            offset + sum(min(0, span) for span in spans) < 0
            or offset + sum(max(0, span) for span in spans) >= size
        ):
            _refuse("an operand outside its block")

    def _same_type(self, *views: View | None) -> torch.dtype:
        dtypes = {self._value(view).dtype for view in views if view is not None}
        if len(dtypes) > 1:
            _refuse("operands of several types")
        return dtypes.pop()

    def _per_token(self, view: View) -> None:
        """Refuse an operand whose tokens do not lie one after the other."""
        if self._value(view).source not in (Source.MADE, Source.INPUT):
            _refuse("an operand that is not one of tokens")

    def _tensor(self, name: str, dims: int | None = None) -> Tensor:
        tensor = self._tensors[name]
        if (
            not isinstance(tensor, Tensor)
            or tensor.is_meta
            or (dims is not None and tensor.dim() != dims)
        ):
            _refuse(f"the weight '{name}' is of another shape")
        return tensor

    def _bias(self, op: Op, count: int) -> None:
        if op.bias and (
            self._tensor(op.bias).numel() != count
            or self._tensor(op.bias).dtype != self._same_type(op.output)
        ):
            _refuse(f"the bias '{op.bias}' is of another size")

    def _layer(self, op: Op) -> LayerShape:
        return self._layers[_number(op.layer, "layer", 0, len(self._layers) - 1)]

    def _state(self, op: Op, size: int, record_bytes: int) -> None:
        states = self._program.states
        if states[_number(op.layer, "state", 0, len(states) - 1)] != StateShape(size, record_bytes):
            _refuse("a state of another size")

    def _matrix(self, matrix: Matrix, *, is_table: bool = False) -> None:
        for each in matrix.shape:
            _number(each, "weights", 1, MAX_SIZE)
        if not matrix.is_whole or (is_table and matrix.form.is_float):
            _refuse("weights in another form than their layer's")

    def _packed(self, weight: PackedWeight, dtype: torch.dtype, op: Op) -> None:
        for each in weight.shape:
            _number(each, "weights", 1, MAX_SIZE)
        if weight.dtype != dtype or weight.transposed != op.transposed or not weight.is_whole:
            _refuse("panels of another weight than their layer's")

    def _plain(self, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype or not tensor.numel() or max(tensor.shape) > MAX_SIZE:
            _refuse("weights of another type than their operands'")

    # ------------------------------------------------------------ operations; `out`: the output, or what one without reads

    def _elementwise(self, op: Op, out: View) -> None:
        self._fits(out, out.rows, 1 if op.code in (Code.MEAN, Code.SUM) else out.cols)
        for view in op.inputs:
            self._fits(view, out.rows, out.cols)

    def _linear(self, op: Op, out: View) -> None:
        dtype = self._same_type(op.inputs[0], out)
        weight = self._tensors[op.weight]
        self._per_token(op.inputs[0])
        if isinstance(weight, Matrix):
            self._matrix(weight)
            outputs, inputs = weight.shape
            if weight.experts:
                _refuse("weights of experts in a plain layer")
            if weight.form.is_float and dtype != torch.bfloat16:
                _refuse("fp8 weights together with numbers in another type than bfloat16")
        elif isinstance(weight, PackedWeight):
            self._packed(weight, dtype, op)
            outputs, inputs = weight.shape
            if weight.experts:
                _refuse("weights of experts in a plain layer")
        else:
            self._plain(self._tensor(op.weight, 2), dtype)
            outputs, inputs = weight.shape[::-1] if op.transposed else weight.shape
        self._fits(op.inputs[0], 1, inputs, is_dense=True)
        self._fits(View(out.value, 1, outputs), 1, outputs)
        self._bias(op, outputs)

    def _embed(self, op: Op, out: View) -> None:
        table = self._tensors[op.weight]
        if isinstance(table, PackedWeight) and table.table is not None:
            table = table.table
        if isinstance(table, Matrix):
            self._matrix(table, is_table=True)
        elif isinstance(table, PackedWeight):
            self._packed(table, self._same_type(out), op)
            if table.experts or table.format != WeightFormat.PANELS_CODED:
                _refuse("a table in panels whose rows are not read")
        else:
            self._plain(table, self._same_type(out))
            if table.dim() != 2 or not table.is_contiguous() or table.is_meta:
                _refuse("a table whose rows do not lie one after the other")
        if table.shape[1] != out.cols:
            _refuse("a table of another width")
        self._fits(View(out.value, 1, out.cols), 1, out.cols)

    def _experts(self, op: Op, out: View) -> None:
        dtype = self._same_type(op.inputs[0], out)
        weight = self._tensors[op.weight]
        if isinstance(weight, Matrix):
            self._matrix(weight)
            experts = weight.experts
            (outputs, inputs) = weight.shape
        elif isinstance(weight, PackedWeight):
            if op.code != Code.EXPERTS:
                _refuse("panels that parts are taken of")
            self._packed(weight, dtype, op)
            experts = weight.experts
            (outputs, inputs) = weight.shape
        else:
            weights = self._tensor(op.weight, 3 if op.code == Code.EXPERTS else None)
            if op.code == Code.HEADS:
                begin, end = (_number(each, "part", 0, MAX_SIZE) for each in op.part)
                weights = weights.unflatten(0, (_number(op.heads, "heads", 1, MAX_SIZE), -1))[
                    :, begin:end
                ]
            self._plain(weights, dtype)
            experts, outputs, inputs = weights.shape
            outputs, inputs = (inputs, outputs) if op.transposed else (outputs, inputs)
        if experts < 1 or (op.code == Code.HEADS and out.rows > experts):
            _refuse("experts that are not there")
        for view in op.inputs[: 2 if op.code == Code.EXPERTS else 1]:
            if self._value(view).source == Source.ROTARY:
                _refuse("an operand that is not one of tokens")
        self._fits(op.inputs[0], out.rows, inputs, is_dense=True)
        if op.code == Code.EXPERTS:
            self._fits(op.inputs[1], 1, out.rows)
        self._fits(out, out.rows, outputs, is_dense=True)
        self._bias(op, experts * outputs)

    def _store(self, op: Op, out: View) -> None:
        shape = self._layer(op)
        size = shape.stored_value_size if op.is_value else shape.key_size
        if (out.rows, out.cols) != (shape.num_kv_heads, size) or self._same_type(
            op.inputs[0]
        ) != self._dtype:
            _refuse("keys or values of another shape than the cache's")
        self._fits(op.inputs[0], out.rows, out.cols, is_dense=True)

    def _signal(self, op: Op, out: View) -> None:
        _number(op.layer, "signal", 0, len(self._program.signals) - 1)
        if (out.rows, out.cols) != (1, self._program.hidden_size):
            _refuse("a signal of another shape than hidden states'")
        self._fits(op.inputs[0], 1, out.cols, is_dense=True)

    def _gather(self, op: Op, out: View) -> None:
        self._same_type(op.inputs[0], out)
        self._fits(op.inputs[0], 1, out.cols, is_dense=True)
        self._fits(View(out.value, 1, out.cols), 1, out.cols)

    def _attention(self, op: Op, out: View) -> None:
        shape = self._layer(op)
        heads = _number(op.heads, "heads", 1, MAX_SIZE)
        _number(op.window, "window", 0, MAX_WINDOW)
        if (
            shape.is_indexer
            or min(shape.num_kv_heads, shape.key_size, shape.value_size) < 1
            or heads % shape.num_kv_heads
        ):
            _refuse("attention to a layer that is none")
        if shape.values_in_keys and shape.value_size > shape.key_size:
            _refuse("values that are longer than the keys they lie in")
        if self._same_type(op.inputs[0], out) != self._dtype:
            _refuse("attention of another form than the cache's")
        self._per_token(op.inputs[0])
        self._fits(op.inputs[0], heads, shape.key_size, is_dense=True)
        self._fits(View(out.value, 1, 1), 1, heads * shape.value_size)
        if op.weight and self._tensor(op.weight).numel() != heads:
            _refuse("slopes of other heads")
        others = op.inputs[1:]
        if op.chosen:
            chooses = self._choices.get(others[0].value)
            if (
                chooses is None
                or chooses.output != others[0]
                or op.chosen != others[0].cols
                or op.sees_all
                or shape.window
            ):
                _refuse("attention to positions that nothing chose")
            others = others[1:]
        if len(others) > 1:
            _refuse("attention to two sinks")
        for sinks in others:
            if self._value(sinks).source != Source.CONSTANT:
                _refuse("sinks that are no constant")
            self._fits(sinks, 1, heads)

    def _choice(self, op: Op, out: View) -> None:
        shape = self._layer(op)
        heads = _number(op.heads, "heads", 1, MAX_SIZE)
        if shape.num_kv_heads != 1 or shape.key_size < 1 or shape.window is not None:
            _refuse("a choice among a layer's positions that are no indexer's")
        if self._same_type(op.inputs[0]) != self._dtype or self._same_type(out) != torch.float32:
            _refuse("a choice of another type than the cache's")
        self._per_token(op.inputs[0])
        self._per_token(op.inputs[1])
        self._fits(op.inputs[0], heads, shape.key_size, is_dense=True)
        self._fits(op.inputs[1], 1, heads)
        self._fits(out, 1, out.cols, is_dense=True)
        self._choices[out.value] = op

    def _convolution(self, op: Op, out: View) -> None:
        weight = self._tensor(op.weight, 2)
        width = _number(weight.shape[1], "width", 1, MAX_WIDTH)
        if weight.shape[0] != out.cols or (op.bias and self._tensor(op.bias).numel() != out.cols):
            _refuse("a convolution of other channels")
        self._fits(op.inputs[0], 1, out.cols)
        self._fits(out, 1, out.cols)
        self._state(op, (width - 1) * out.cols, out.cols * self._same_type(op.inputs[0]).itemsize)

    def _delta_rule(self, op: Op, out: View) -> None:
        query, key, value, decay, *betas = op.inputs
        size = key.cols
        value_size = value.cols
        key_heads = key.rows
        for count in (size, value_size, key_heads, value.rows, decay.cols):
            _number(count, "sizes of a delta rule", 1, MAX_SIZE)
        if op.heads != value.rows or op.heads % key_heads or decay.cols not in (1, size):
            _refuse("a delta rule of an unusual shape")
        width = self._same_type(query, key, value).itemsize
        for view, count, numbers in (
            (query, key_heads, size),
            (key, key_heads, size),
            (value, op.heads, value_size),
        ):
            self._fits(view, count, numbers)
        self._fits(decay, op.heads, decay.cols)
        for beta in betas:
            self._fits(beta, op.heads, 1)
        self._fits(out, op.heads, value_size)
        record = (key_heads * size + op.heads * value_size) * width + op.heads * (
            decay.cols + 1
        ) * 4
        self._state(op, op.heads * size * value_size, record)

    def _scan(self, op: Op, out: View) -> None:
        rates = self._tensor(op.weight, 2) if op.weight else None
        each = 1 if rates is None else _number(rates.shape[1], "numbers of a state", 1, MAX_SIZE)
        if len(op.inputs) == 3 or (
            rates is not None and (rates.shape[0] != out.cols or len(op.inputs) != 4)
        ):
            _refuse("a scan of an unusual shape")
        for view in (*op.inputs[:2], out):
            self._fits(view, 1, out.cols)
        for view in op.inputs[2:]:
            self._fits(view, 1, each)
        widths = [self._value(view).dtype.itemsize for view in op.inputs[:3]]
        record = sum(
            width * count for width, count in zip(widths, (out.cols, out.cols, each), strict=False)
        )
        self._state(op, each * out.cols, record)

    def _top(self, op: Op, out: View) -> None:
        self._fits(op.inputs[0], out.rows, _whole(op.numbers[0], "numbers", out.cols, MAX_SIZE))
        self._fits(out, out.rows, out.cols)

    def _take(self, op: Op, out: View) -> None:
        self._fits(op.inputs[0], out.rows, _whole(op.numbers[0], "numbers", 1, MAX_SIZE))
        self._fits(op.inputs[1], out.rows, out.cols)
        self._fits(out, out.rows, out.cols)

    def _put(self, op: Op, out: View) -> None:
        count = _whole(op.numbers[0], "numbers", 1, MAX_SIZE)
        self._fits(op.inputs[0], out.rows, out.cols)
        for view in op.inputs[1:]:
            self._fits(view, out.rows, count)
        self._fits(out, out.rows, out.cols)


_CHECKS: dict[Code, Callable[[_Checker, Op, View], None]] = {
    Code.LINEAR: _Checker._linear,
    Code.EMBED: _Checker._embed,
    Code.EXPERTS: _Checker._experts,
    Code.HEADS: _Checker._experts,
    Code.STORE: _Checker._store,
    Code.SIGNAL: _Checker._signal,
    Code.GATHER: _Checker._gather,
    Code.ATTENTION: _Checker._attention,
    Code.CHOICE: _Checker._choice,
    Code.CONVOLUTION: _Checker._convolution,
    Code.DELTA_RULE: _Checker._delta_rule,
    Code.SCAN: _Checker._scan,
    Code.TOP: _Checker._top,
    Code.TAKE: _Checker._take,
    Code.PUT: _Checker._put,
}


def _number(value: int, called: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        _refuse(f"{called} {value}, which is not from {least} to {most}")
    return value


def _whole(value: float, called: str, least: int, most: int) -> int:
    if not isfinite(value) or value != int(value):
        _refuse(f"{called} {value}, which is no whole number")
    return _number(int(value), called, least, most)


def _refuse(what: str) -> NoReturn:
    raise NotLoweredError(f"a program with {what}")
