"""A program and a model's weights as the structures that the executor reads."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from outrider.huge_pages import on_huge_pages
from outrider.kv import LayerShape
from outrider.models.linear.panel import WIDTH, to_panels
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.coding import Coder
from outrider.runtime.matrices import Matrix, PackedWeight
from outrider.runtime.ops import Code, Op, Program, Source, View
from outrider.runtime.program_check import check_program
from outrider.runtime.schedule import Schedule, schedule
from outrider.runtime.structures import (
    OperandStruct,
    OpStruct,
    PhaseStruct,
    ProgramStruct,
    WeightFormat,
)

# where a value lies, as in `native/program.h`
NOTHING, BODY, HEAD, CONSTANT, ROTARY, INPUT = range(6)


def packed(weight: Tensor) -> tuple[WeightFormat, Tensor]:
    """A plain weight (out, in) as the executor multiplies it. Raises NotLoweredError for one that
    it cannot."""
    outputs, inputs = weight.shape
    if weight.dtype == torch.bfloat16 and inputs % 2 == 0:
        return WeightFormat.PANELS_BF16, to_panels(weight)
    if weight.dtype != torch.float32:
        raise NotLoweredError(
            f"a weight of {inputs} inputs in {str(weight.dtype).removeprefix('torch.')}"
        )
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % WIDTH))
    return WeightFormat.PANELS_FP32, padded.view(-1, WIDTH, inputs).transpose(1, 2).contiguous()


# Panels of plain weights, as long as both are in use: models made from one module share them, and
# so do heads with their target.
_shared: WeakIdKeyDictionary = WeakIdKeyDictionary()


def shared_panels(
    weight: Tensor, coder: Coder | None = None, *, transposed: bool
) -> tuple[WeightFormat, Tensor]:
    """`packed` of a module's own weight, made once; coded where it can be."""
    key = (transposed, None if weight.is_inference() else weight._version)
    known = _shared.get(weight)
    panels = known[2]() if known is not None and known[0] == key else None
    if panels is not None:
        return known[1], panels
    plain = weight.t().contiguous() if transposed else weight
    coded = _coded(coder, [plain])
    if coded is None:
        kind, panels = packed(plain)
        panels = on_huge_pages(panels)
    else:
        kind, panels = WeightFormat.PANELS_CODED, coded
    _shared[weight] = (key, kind, ref(panels))
    return kind, panels


def layers_panels(
    weights: Tensor, coder: Coder | None, *, transposed: bool
) -> tuple[WeightFormat, Tensor]:
    """`packed` of weights (layers, out, in), or (layers, in, out) of a transposed operation; coded
    where they can be."""
    coded = _coded(coder, weights, transposed=transposed)
    if coded is not None:
        return WeightFormat.PANELS_CODED, coded
    kind, panels = WeightFormat.PANELS_CODED, torch.empty(0)
    for number, weight in enumerate(weights):
        kind, values = packed(weight.t().contiguous() if transposed else weight)
        panels = panels if number else values.new_empty(len(weights), *values.shape)
        panels[number] = values  # one at a time, so that no second copy of all lies next to them
    return kind, panels


def _coded(
    coder: Coder | None, weights: Sequence[Tensor] | Tensor, *, transposed: bool = False
) -> Tensor | None:
    """Coded panels of weights of one shape, one after the other; None where they cannot be."""
    first = weights[0]
    if coder is None or first.dtype != torch.bfloat16:
        return None

    def part(number: int) -> Tensor:
        weight = weights[number]
        return (weight.t() if transposed else weight).contiguous()

    outputs, inputs = first.shape[::-1] if transposed else first.shape
    return coder.panels(part, len(weights), (outputs, inputs))


class Binding:
    """The structures of one program, and the tensors that they point into."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor | Matrix | PackedWeight],
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        coder: Coder | None = None,
    ) -> None:
        check_program(program, tensors, layers, dtype)
        self._program = program
        self._tensors = tensors
        self._layers = layers
        self._dtype = dtype
        self._coder = coder
        self._kept: list[Tensor] = []
        # matrices that logits are made with, which may be tables of embeddings, too
        self._tied = {
            op.weight
            for op in (*program.body, *program.head)
            if op.code == Code.LINEAR and not op.transposed
        }
        self._schedule: Schedule = schedule(program)
        phases = self._schedule.phases
        ops = [self._op(op) for phase in phases for op in phase.ops]
        self._ops = (OpStruct * len(ops))(*ops)
        starts = [0]
        for phase in phases:
            starts.append(starts[-1] + len(phase.ops))
        self._phases = (PhaseStruct * len(phases))(
            *(
                PhaseStruct(int(phase.kind), begin, end, phase.is_head)
                for phase, begin, end in zip(phases, starts, starts[1:], strict=False)
            )
        )
        assert program.logits is not None
        self.struct = ProgramStruct(
            len(ops),
            len(phases),
            ctypes.addressof(self._ops),
            ctypes.addressof(self._phases),
            self._schedule.body_bytes,
            self._schedule.head_bytes,
            self._operand(program.logits),
            program.logits.cols,
            0,
            0,
        )
        del self._tensors  # weights that lie in panels are needed here no longer

    def within(self, window: int) -> Binding:
        """These structures, on the same weights, where no token sees more than the last `window`
        positions and layers keep no others."""
        twin = copy.copy(self)
        twin._ops = type(self._ops)(*self._ops)
        for op in twin._ops:
            if op.code in (Code.ATTENTION, Code.STORE):
                op.is_short = True
            if op.code == Code.ATTENTION:
                op.window = min(op.window or window, window)
        twin.struct = ProgramStruct.from_buffer_copy(self.struct)
        twin.struct.ops = ctypes.addressof(twin._ops)
        return twin

    @property
    def body_bytes(self) -> int:
        """Memory for the values of each token."""
        return self._schedule.body_bytes

    @property
    def head_bytes(self) -> int:
        """Memory for the values of each row whose logits are asked for."""
        return self._schedule.head_bytes

    def _operand(self, view: View | None) -> OperandStruct:
        if view is None:
            return OperandStruct(NOTHING)
        value = self._program.values[view.value]
        width = value.dtype.itemsize
        steps = (view.offset, view.row_step, view.col_step, value.dtype == torch.bfloat16)
        if value.source == Source.CONSTANT:
            return OperandStruct(CONSTANT, self._keep(self._tensor(value.name)), 0, *steps)
        if value.source in (Source.ROTARY, Source.INPUT):
            source = ROTARY if value.source == Source.ROTARY else INPUT
            return OperandStruct(source, int(value.name), value.size * width, *steps)
        section = HEAD if view.value in self._schedule.in_head else BODY
        return OperandStruct(
            section, self._schedule.offsets[view.value], value.size * width, *steps
        )

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _op(self, op: Op) -> OpStruct:
        operands = (OperandStruct * 5)(
            *(self._operand(view) for view in (*op.inputs, *[None] * 5)[:5])
        )
        first = op.output if op.output is not None else op.inputs[0]
        struct = OpStruct(int(op.code), first.rows, first.cols, self._operand(op.output), operands)
        struct.numbers = (ctypes.c_double * 2)(*(*op.numbers, 0.0, 0.0)[:2])
        struct.layer = op.layer
        struct.by_position = op.by_position
        struct.is_value = op.is_value
        if op.code == Code.LINEAR:
            self._bind_linear(struct, op)
        elif op.code == Code.EXPERTS:
            self._bind_experts(struct, op)
        elif op.code == Code.HEADS:
            self._bind_layers(
                struct, op, self._tensor(op.weight).unflatten(0, (op.heads, -1))[:, slice(*op.part)]
            )
        elif op.code == Code.EMBED:
            struct.numbers[0] = op.bound
            self._bind_table(struct, op)
        elif op.code == Code.ATTENTION:
            shape = self._layers[op.layer]
            struct.heads = op.heads
            struct.kv_heads = shape.num_kv_heads
            struct.window = op.window
            struct.sees_all = op.sees_all
            struct.size = shape.key_size
            struct.value_size = shape.value_size
            struct.scale = op.scale
            struct.softcap = op.softcap
            struct.values_in_keys = shape.values_in_keys
            struct.weight = (
                self._keep(self._tensor(op.weight).float().contiguous()) if op.weight else None
            )
            struct.is_short = shape.window is not None
            struct.chosen = op.chosen
            if shape.window is not None and not 0 < op.window <= shape.window:
                raise NotLoweredError(
                    f"attention that sees {op.window or 'all'} positions of a layer that keeps "
                    f"{shape.window}"
                )
            self._check(op)
        elif op.code == Code.CHOICE:
            struct.heads = op.heads
            struct.size = self._layers[op.layer].key_size
            struct.scale = op.scale
            self._check(op)
        elif op.code == Code.STORE:
            struct.is_short = self._layers[op.layer].window is not None
            self._check(op)
        elif op.code == Code.CONVOLUTION:
            weight = self._tensor(op.weight)
            struct.K = weight.shape[1]
            struct.weight = self._keep(weight.float().t().contiguous())
            struct.bias = (
                self._keep(self._tensor(op.bias).float().contiguous()) if op.bias else None
            )
        elif op.code == Code.DELTA_RULE:
            key, value, decay = op.inputs[1:4]
            struct.heads = value.rows
            struct.kv_heads = key.rows
            struct.size = key.cols
            struct.value_size = value.cols
            struct.N = decay.cols
            struct.scale = op.scale
        elif op.code == Code.SCAN:
            rates = self._tensor(op.weight) if op.weight else None
            struct.size = 1 if rates is None else rates.shape[1]
            struct.weight = None if rates is None else self._keep(rates.float().t().contiguous())
        return struct

    def _check(self, op: Op) -> None:
        """Queries, keys and values must have the cache's type; pairs of bf16 must be whole."""
        shape = self._layers[op.layer]
        dtype = self._program.values[op.inputs[0].value].dtype
        if dtype != self._dtype or (dtype == torch.bfloat16 and shape.key_size % 2):
            raise NotLoweredError("attention in another type than the cache's")

    def _tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor

    def _bind_table(self, struct: OpStruct, op: Op) -> None:
        table = self._tensors[op.weight]
        struct.N, struct.K = table.shape
        if isinstance(table, Matrix):
            self._bind_blocks(struct, table)
            return
        if isinstance(table, PackedWeight):
            panels = table.panels if table.table is None else table.table
            struct.format = int(table.format if table.table is None else WeightFormat.TABLE)
            struct.weight = self._keep(panels)
            return
        kind, panels = WeightFormat.TABLE, table
        if self._coder is not None and op.weight in self._tied:
            kind, panels = shared_panels(table, self._coder, transposed=False)
        if kind != WeightFormat.PANELS_CODED:  # rows of other panels are not read
            kind, panels = WeightFormat.TABLE, table
        struct.format = int(kind)
        struct.weight = self._keep(panels)

    def _bind_linear(self, struct: OpStruct, op: Op) -> None:
        weight = self._tensors[op.weight]
        struct.bias = self._keep(self._tensor(op.bias).contiguous()) if op.bias else None
        if isinstance(weight, Matrix):
            struct.N, struct.K = weight.shape
            self._bind_blocks(struct, weight)
            return
        if isinstance(weight, PackedWeight):
            struct.N, struct.K = weight.shape
            struct.format = int(weight.format)
            struct.weight = self._keep(weight.panels)
            return
        kind, panels = shared_panels(weight, self._coder, transposed=op.transposed)
        struct.format = int(kind)
        struct.weight = self._keep(panels)
        struct.N, struct.K = weight.shape[::-1] if op.transposed else weight.shape

    def _bind_blocks(self, struct: OpStruct, matrix: Matrix) -> None:
        if matrix.form.is_float and self._dtype != torch.bfloat16:
            raise NotLoweredError("fp8 weights together with numbers in another type than bfloat16")
        struct.format = int(matrix.format)
        struct.form = matrix.form.number
        struct.group = matrix.form.group
        struct.weight = self._keep(matrix.panels)

    def _bind_experts(self, struct: OpStruct, op: Op) -> None:
        struct.bias = self._keep(self._tensor(op.bias).contiguous()) if op.bias else None
        weight = self._tensors[op.weight]
        if isinstance(weight, Matrix | PackedWeight):
            struct.experts = weight.experts
            (struct.N, struct.K) = weight.shape
            if isinstance(weight, Matrix):
                self._bind_blocks(struct, weight)
            else:
                struct.format = int(weight.format)
                struct.weight = self._keep(weight.panels)
            return
        self._bind_layers(struct, op, self._tensor(op.weight))

    def _bind_layers(self, struct: OpStruct, op: Op, weights: Tensor) -> None:
        """Weights (layers, out, in), or (layers, in, out) of a transposed operation."""
        kind, panels = layers_panels(weights, self._coder, transposed=op.transposed)
        struct.format = int(kind)
        struct.weight = self._keep(panels)
        struct.experts = len(weights)
        struct.N, struct.K = (
            (weights.shape[2], weights.shape[1])
            if op.transposed
            else (weights.shape[1], weights.shape[2])
        )
