"""A program run by torch, one operation after the other: what every other way to run it is tested
against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.gguf.formats import BLOCK
from outrider.models.pass_plan import PassPlan
from outrider.runtime.ops import REDUCING, Code, Op, Program, Source, View
from outrider.runtime.rotary import real_tables

UNARY: dict[Code, Callable[[Tensor], Tensor]] = {
    Code.COPY: lambda x: x, Code.NEG: torch.neg, Code.SQUARE: torch.square, Code.RSQRT: torch.rsqrt, Code.SQRT: torch.sqrt,
    Code.TANH: torch.tanh, Code.SIGMOID: torch.sigmoid, Code.SILU: F.silu, Code.GELU: F.gelu, Code.RELU: F.relu,
    Code.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"), Code.RECIPROCAL: torch.reciprocal, Code.EXP: torch.exp,
    Code.LOG: torch.log, Code.EXPM1: torch.expm1, Code.LOG1P: torch.log1p, Code.NOT: lambda x: (x == 0).float(),
}  # fmt: skip
BINARY: dict[Code, Callable[[Tensor, Tensor], Tensor]] = {
    Code.ADD: torch.add, Code.SUB: torch.sub, Code.MUL: torch.mul, Code.DIV: torch.div,
    Code.LARGER: torch.maximum, Code.SMALLER: torch.minimum,
    Code.GREATER: lambda a, b: (a > b).float(), Code.AT_LEAST: lambda a, b: (a >= b).float(),
    Code.EQUAL: lambda a, b: (a == b).float(),
}  # fmt: skip


class ReferenceRun:
    """A program and the module whose weights it names, as a `Run` (`models/lm.py`).

    `rounds`: inputs of layers that keep integers are rounded to 8 bits, as the executor does.
    """

    def __init__(self, module: Any, program: Program, *, rounds: bool = False) -> None:
        self._program = program
        self._module = module
        self._rounds = rounds
        named = {
            **dict(module.named_parameters()),
            **dict(module.named_buffers()),
            **program.constants,
        }
        dtype = next(value.dtype for value in program.values if value.source == Source.MADE)
        self._tensors = {name: tensor.detach() for name, tensor in named.items()}
        self._tensors |= {
            name: matrix.values().to(dtype) for name, matrix in program.matrices.items()
        }

    def __call__(self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
        """Logits (B, K, V), fp32."""
        return self.with_hidden(ids, positions, plan, columns, ())[0]

    def with_hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: PassPlan,
        columns: Tensor,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (B, K, V), fp32, and the hidden states (B, T, H) of these layers."""
        work = _Pass(self._program, self._module, self._tensors, ids, positions, plan, self._rounds)
        for op in self._program.body:
            work.do(op)
        work.select(columns)
        for op in self._program.head:
            work.do(op)
        assert self._program.logits is not None
        logits = work.read(self._program.logits)[:, 0]
        hidden = [
            work.signals[self._program.signals.index(layer)].view(*ids.shape, -1)
            for layer in layers
        ]
        return logits.float().view(ids.shape[0], len(columns), -1), hidden


class _Pass:
    """The values of one pass."""

    def __init__(
        self,
        program: Program,
        module: Any,
        tensors: dict[str, Tensor],
        ids: Tensor,
        positions: Tensor,
        plan: PassPlan,
        rounds: bool,
    ) -> None:
        self._program = program
        self._tensors = tensors
        self._plan = plan
        self._rounds = rounds
        self._ids = ids
        self._positions = positions
        self._count = ids.numel()
        self._rows = torch.arange(self._count)
        self._made: dict[int, Tensor] = {}  # (tokens, size)
        self.signals: dict[int, Tensor] = {}
        self._rotary: list[Tensor] = []
        for path, further, which in program.rotary:
            like = torch.empty(1, dtype=_dtype_of_rotary(program, len(self._rotary)))
            out = module.get_submodule(path)(like, positions, *further)
            self._rotary.append(real_tables(out)[which].reshape(self._count, -1))

    def select(self, columns: Tensor) -> None:
        """Keep only some columns: from now on the rows of the pass are these columns of each of its
        rows."""
        starts = torch.arange(self._ids.shape[0])[:, None] * self._ids.shape[1]
        self._rows = (starts + columns).flatten()
        self._count = len(self._rows)

    def read(self, view: View) -> Tensor:
        """(tokens, rows, cols) of a view."""
        value = self._program.values[view.value]
        if value.source == Source.CONSTANT:
            flat = self._tensors[value.name].reshape(-1)
            step = 0
        else:
            flat = (
                self._rotary[int(value.name)]
                if value.source == Source.ROTARY
                else self._made[view.value]
            )
            step = value.size
        sizes = (self._count, view.rows, view.cols)
        return flat.contiguous().as_strided(
            sizes, (step, view.row_step, view.col_step), view.offset
        )

    def _write(self, view: View, numbers: Tensor) -> None:
        value = self._program.values[view.value]
        if view.value not in self._made:
            self._made[view.value] = torch.zeros(self._count, value.size, dtype=value.dtype)
        steps = (value.size, view.row_step, view.col_step)
        self._made[view.value].as_strided(numbers.shape, steps, view.offset).copy_(numbers)

    def do(self, op: Op) -> None:
        """One operation."""
        if op.code in SPECIAL:
            SPECIAL[op.code](self, op)
            return
        assert op.output is not None
        inputs = [self.read(view).float() for view in op.inputs]
        if op.code in UNARY:
            numbers = UNARY[op.code](*inputs)
        elif op.code in BINARY:
            numbers = BINARY[op.code](*inputs)
        elif op.code == Code.CLAMP:
            numbers = inputs[0].clamp(*op.numbers)
        elif op.code == Code.SOFTPLUS:
            numbers = F.softplus(inputs[0], *op.numbers)
        elif op.code == Code.WHERE:
            numbers = torch.where(inputs[0] != 0, inputs[1], inputs[2])
        else:
            assert op.code in REDUCING
            numbers = _reduced(op, inputs)
        if op.code in (Code.MEAN, Code.SUM):
            self._write(
                View(op.output.value, op.output.rows, 1, op.output.offset, op.output.row_step, 0),
                numbers,
            )
        else:
            self._write(op.output, numbers)

    def linear(self, op: Op) -> None:
        weight = self._tensors[op.weight]
        bias = self._tensors[op.bias] if op.bias else None
        assert op.output is not None
        x = self.read(op.inputs[0])
        if self._is_rounded(op):
            x = _in_bytes(x)
        self._write(op.output, F.linear(x, weight.t() if op.transposed else weight, bias))

    def _is_rounded(self, op: Op) -> bool:
        """Whether the executor rounds what this operation multiplies."""
        matrix = self._program.matrices.get(op.weight)
        return self._rounds and matrix is not None and not matrix.form.is_float

    def experts(self, op: Op) -> None:
        weight = self._tensors[op.weight]
        bias = self._tensors[op.bias] if op.bias else None
        x = self.read(op.inputs[0])
        index = self.read(op.inputs[1])[:, 0].long()
        assert op.output is not None
        if self._is_rounded(op):
            x = _in_bytes(x)
        out = x.new_zeros(*index.shape, op.output.cols)
        for expert in index.unique().tolist():
            own = weight[expert].t() if op.transposed else weight[expert]
            chosen = index == expert
            out[chosen] = F.linear(x[chosen], own, None if bias is None else bias[expert])
        self._write(op.output, out)

    def heads(self, op: Op) -> None:
        assert op.output is not None
        weight = self._tensors[op.weight].unflatten(0, (op.heads, -1))[:, slice(*op.part)]
        self._write(
            op.output,
            torch.einsum(
                "mhi,hio->mho" if op.transposed else "mhi,hoi->mho", self.read(op.inputs[0]), weight
            ),
        )

    def choose(self, op: Op) -> None:
        assert op.output is not None
        numbers, *others = [self.read(view).float() for view in op.inputs]
        if op.code == Code.TOP:
            found = torch.sort(numbers, dim=-1, descending=True, stable=True)[1][
                ..., : op.output.cols
            ]
        elif op.code == Code.TAKE:
            found = numbers.gather(2, others[0].long())
        else:
            found = numbers.scatter(2, others[0].long(), others[1])
        self._write(op.output, found.float())

    def embed(self, op: Op) -> None:
        assert op.output is not None
        index = (self._positions if op.by_position else self._ids).flatten() + op.layer
        if op.bound:
            index = torch.where(index < op.bound, index, 0)
        self._write(op.output, self._tensors[op.weight][index][:, None])

    def signal(self, op: Op) -> None:
        self.signals[op.layer] = self.read(op.inputs[0])[:, 0].clone()

    def gather(self, op: Op) -> None:
        assert op.output is not None
        value = self._program.values[op.inputs[0].value]
        whole = self._made[op.inputs[0].value].view(-1, value.size)
        view = op.inputs[0]
        self._write(op.output, whole[self._rows, view.offset : view.offset + view.cols][:, None])

    def store(self, op: Op) -> None:
        cache = (self._plan.values if op.is_value else self._plan.keys)[op.layer]
        numbers = self.read(op.inputs[0])
        cache.view(-1, *cache.shape[2:]).index_copy_(
            0, self._plan.indices.flatten(), numbers.to(cache.dtype)
        )

    def choice(self, op: Op) -> None:
        """Places in the slot, not positions: only `attend` reads them."""
        assert op.output is not None
        rows, tokens = self._ids.shape
        mask = self._plan.mask[:, 0, :tokens].float()
        query = self.read(op.inputs[0]).view(rows, tokens, op.heads, -1).float()
        weights = self.read(op.inputs[1]).view(rows, tokens, op.heads).float()
        keys = self._plan.keys[op.layer][:rows, : mask.shape[2], 0].float()
        products = torch.relu(torch.einsum("bthd,bsd->bths", query, keys) * op.scale)
        scores = torch.einsum("bth,bths->bts", weights, products) + mask
        found = scores.sort(dim=-1, descending=True, stable=True).indices[..., : op.output.cols]
        self._write(op.output, found.reshape(self._count, 1, -1).float())

    def attend(self, op: Op) -> None:
        assert op.output is not None
        plan = self._plan
        (rows, tokens) = self._ids.shape
        mask = plan.mask if not op.window or plan.window_mask is None else plan.window_mask
        query = self.read(op.inputs[0]).view(rows, tokens, op.heads, -1).transpose(1, 2).float()
        keys, values = (
            store[op.layer][:rows, : mask.shape[3]].transpose(1, 2).float()
            for store in (plan.keys, plan.values)
        )
        values = values if values.shape[3] else keys[..., : op.output.cols]
        keys, values = (
            one.repeat_interleave(op.heads // one.shape[1], dim=1) for one in (keys, values)
        )
        scores = query @ keys.transpose(2, 3) * op.scale
        if op.softcap:
            scores = torch.tanh(scores / op.softcap) * op.softcap
        scores = scores + mask[:, :, :tokens].float()
        if op.weight:
            scores = (
                scores + self._tensors[op.weight].view(1, -1, 1, 1) * plan.distances[:, :, :tokens]
            )
        if op.chosen:
            places = self.read(op.inputs[1]).view(rows, tokens, -1).long()
            hidden = torch.ones(rows, tokens, mask.shape[3], dtype=torch.bool).scatter(
                2, places, False
            )
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        if len(op.inputs) > (at := 2 if op.chosen else 1):
            sinks = self.read(op.inputs[at])[:1].view(1, op.heads, 1, 1).float()
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : mask.shape[3]]
        self._write(
            op.output, (weights @ values).transpose(1, 2).reshape(self._count, op.heads, -1)
        )


SPECIAL: dict[Code, Callable[[_Pass, Op], None]] = {
    Code.LINEAR: _Pass.linear, Code.EMBED: _Pass.embed, Code.SIGNAL: _Pass.signal, Code.GATHER: _Pass.gather,
    Code.STORE: _Pass.store, Code.ATTENTION: _Pass.attend, Code.CHOICE: _Pass.choice, Code.EXPERTS: _Pass.experts,
    Code.HEADS: _Pass.heads,
    Code.TOP: _Pass.choose, Code.TAKE: _Pass.choose, Code.PUT: _Pass.choose,
}  # fmt: skip


def _in_bytes(x: Tensor) -> Tensor:
    """Numbers (..., size) rounded to 8 bits, 32 at a time with a scale of their own."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    steps = torch.where(largest > 0, 127 / largest, 0.0)
    return ((blocks * steps).round() * (largest / 127)).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _reduced(op: Op, inputs: list[Tensor]) -> Tensor:
    x = inputs[0]
    if op.code == Code.MEAN:
        return x.mean(-1, keepdim=True)
    if op.code == Code.SUM:
        return x.sum(-1, keepdim=True)
    if op.code == Code.SOFTMAX:
        return torch.softmax(x, dim=-1)
    centred = x - x.mean(-1, keepdim=True) if op.code == Code.LAYER_NORM else x
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + op.numbers[0])
    normed = normed * inputs[1] if len(inputs) > 1 else normed
    return normed + inputs[2] if len(inputs) > 2 else normed


def _dtype_of_rotary(program: Program, index: int) -> torch.dtype:
    return next(
        v.dtype for v in program.values if v.source == Source.ROTARY and v.name == str(index)
    )
