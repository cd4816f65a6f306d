"""Recurrent operations of a program as kernels: where each reads, what it keeps, and the blocks
that it is divided into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.gpu.state_kernels import convolution, delta_rule, scan, window_before
from outrider.runtime.gpu.value_offsets import ValueOffset
from outrider.runtime.gpu.work import Work
from outrider.runtime.ops import Code, Op, Program, View

CHANNELS = 256  # of one program of a convolution
COLUMNS = 32  # of a state that one program keeps in registers
CELLS = 2048  # numbers of a state that one program of a scan keeps


class Input(NamedTuple):
    """A view of a value that an operation reads: numbers (rows, columns) of each token."""

    tensor: int
    width: int
    offset: int
    row_step: int
    col_step: int
    dtype: torch.dtype

    @property
    def by_row(self) -> tuple[int, int, int]:
        return self.width, self.offset, self.row_step

    @property
    def by_column(self) -> tuple[int, int, int]:
        return self.width, self.offset, self.col_step


class Recurrence:
    """A recurrent operation. Raises NotLoweredError for one that the kernels do not make."""

    def __init__(
        self,
        op: Op,
        program: Program,
        offsets: Mapping[int, ValueOffset],
        tensors: Mapping[str, Tensor],
    ) -> None:
        assert op.output is not None
        self._op = op
        self._offsets = offsets
        self._program = program
        self.inputs = [self._input(view) for view in op.inputs]
        self.out = offsets[op.output.value]
        self.dtype = program.values[op.output.value].dtype
        self.record_bytes = program.states[op.layer].record_bytes
        self.weight = tensors[op.weight].detach().float().t().contiguous() if op.weight else None
        self.bias = tensors[op.bias].detach().float().contiguous() if op.bias else None
        makers: dict[Code, Callable[[Work, Tensor, Tensor], None]] = {
            Code.CONVOLUTION: self._convolve,
            Code.DELTA_RULE: self._delta_rule,
            Code.SCAN: self._scan,
        }
        self._make = makers[op.code]
        for dtype in (
            {torch.float32, self.inputs[1].dtype}
            if op.code == Code.DELTA_RULE
            else {one.dtype for one in self.inputs}
        ):
            self._line(dtype)

    def __call__(self, work: Work) -> None:
        """Make the operation's value for all tokens of a pass."""
        states = work.plan.states
        assert states is not None
        output = torch.empty(work.count, self.out.width, dtype=self.dtype, device=work.ids.device)
        self._make(work, states.table(work.ids.device), output)
        work.tensors[self.out.tensor] = output

    def _input(self, view: View) -> Input:
        if view.value not in self._offsets:
            raise NotLoweredError("a recurrent operation over numbers that no operation makes")
        at = self._offsets[view.value]
        return Input(
            at.tensor,
            at.width,
            at.offset + view.offset,
            view.row_step,
            view.col_step,
            self._program.values[view.value].dtype,
        )

    def _line(self, dtype: torch.dtype) -> int:
        """Numbers of a type that a record has room for."""
        count, rest = divmod(self.record_bytes, dtype.itemsize)
        if rest:
            raise NotLoweredError(
                f"records of {self.record_bytes} bytes, which hold no whole {dtype}"
            )
        return count

    def _branches(self, work: Work, size: int) -> Tensor:
        """Room for the states of a tree's tokens, and for the one in front of them."""
        if work.parents is None:
            return work.ids
        return torch.empty(
            work.num_rows * (work.num_tokens + 1) * size,
            dtype=torch.float32,
            device=work.ids.device,
        )

    def _convolve(self, work: Work, moves: Tensor, output: Tensor) -> None:
        (x,) = self.inputs
        weight = self.weight
        states = work.plan.states
        assert weight is not None
        assert states is not None
        last = len(weight) - 1
        channels = weight.shape[1]
        buffer = states.states[self._op.layer]
        records = states.records[self._op.layer].view(x.dtype)
        window = torch.empty(
            max(1, work.num_rows * last * channels), dtype=torch.float32, device=work.ids.device
        )
        blocks = triton.cdiv(channels, CHANNELS)
        window_before[(work.num_rows, blocks)](
            buffer,
            records,
            moves,
            window,
            states.num_records,
            CHANNELS=channels,
            LAST=last,
            BLOCK=CHANNELS,
            num_warps=4,
        )
        width, offset, step = x.by_column
        convolution[(work.count, blocks)](
            work.tensors[x.tensor],
            weight,
            weight if self.bias is None else self.bias,
            window,
            _parents(work),
            buffer,
            records,
            moves,
            output,
            work.num_tokens,
            states.num_records,
            X_WIDTH=width,
            X_OFFSET=offset,
            X_STEP=step,
            CHANNELS=channels,
            LAST=last,
            BIASED=self.bias is not None,
            SILU=bool(self._op.numbers[0]),
            IN_TREE=work.parents is not None,
            BLOCK=CHANNELS,
            num_warps=4,
        )

    def _delta_rule(self, work: Work, moves: Tensor, output: Tensor) -> None:
        op = self._op
        states = work.plan.states
        assert states is not None
        query, key, value, decay, *betas = self.inputs
        beta = betas[0] if betas else decay
        heads = op.inputs[2].rows
        key_heads = op.inputs[1].rows
        size = op.inputs[1].cols
        value_size = op.inputs[2].cols
        decays = op.inputs[3].cols
        records = states.records[op.layer]
        pad = max(1, triton.next_power_of_2(size))
        block = min(COLUMNS, triton.next_power_of_2(value_size))
        named: dict[str, int] = {}
        for name, operand in (
            ("QUERY", query),
            ("KEY", key),
            ("VALUE", value),
            ("DECAY", decay),
            ("BETA", beta),
        ):
            named |= dict(
                zip(
                    (f"{name}_WIDTH", f"{name}_OFFSET", f"{name}_STEP"), operand.by_row, strict=True
                )
            )
        given = (work.tensors[operand.tensor] for operand in (query, key, value, decay, beta))
        delta_rule[(work.num_rows * heads, triton.cdiv(value_size, block))](
            *given,
            records.view(key.dtype),
            records.view(torch.float32),
            states.states[op.layer],
            self._branches(work, heads * size * value_size),
            _parents(work),
            moves,
            output,
            work.num_tokens,
            states.num_records,
            op.scale,
            **named,
            DECAYS=decays,
            CORRECTS=bool(betas),
            KEY_LINE=self._line(key.dtype),
            DECAY_LINE=self._line(torch.float32),
            DECAYS_AT=(key_heads * size + heads * value_size)
            * key.dtype.itemsize
            // torch.float32.itemsize,
            HEADS=heads,
            KEY_HEADS=key_heads,
            SIZE=size,
            VALUE_SIZE=value_size,
            EPSILON=op.numbers[0],
            OWN_DECAYS=int(decays > 1),
            IN_TREE=work.parents is not None,
            SIZE_PAD=pad,
            BLOCK=block,
            num_warps=4,
        )

    def _scan(self, work: Work, moves: Tensor, output: Tensor) -> None:
        op = self._op
        states = work.plan.states
        assert states is not None
        value, step, *pair = self.inputs
        key, query = pair or (value, value)
        channels = op.inputs[0].cols
        each = 1 if self.weight is None else len(self.weight)
        records = states.records[op.layer]
        pad = triton.next_power_of_2(each)
        block = max(16, min(128, CELLS // pad))
        step_at = channels * value.dtype.itemsize
        key_at = step_at + channels * step.dtype.itemsize
        named: dict[str, int] = {}
        for name, operand in (("VALUE", value), ("STEP", step), ("KEY", key), ("QUERY", query)):
            named |= dict(
                zip(
                    (f"{name}_WIDTH", f"{name}_OFFSET", f"{name}_STEP"),
                    operand.by_column,
                    strict=True,
                )
            )
        given = (work.tensors[operand.tensor] for operand in (value, step, key, query))
        scan[(work.num_rows, triton.cdiv(channels, block))](
            *given,
            work.ids if self.weight is None else self.weight,
            records.view(value.dtype),
            records.view(step.dtype),
            records.view(key.dtype),
            states.states[op.layer],
            self._branches(work, each * channels),
            _parents(work),
            moves,
            output,
            work.num_tokens,
            states.num_records,
            **named,
            VALUE_LINE=self._line(value.dtype),
            STEP_LINE=self._line(step.dtype),
            STEP_AT=step_at // step.dtype.itemsize,
            KEY_LINE=self._line(key.dtype),
            KEY_AT=key_at // key.dtype.itemsize,
            CHANNELS=channels,
            EACH=each,
            RATED=self.weight is not None,
            KEYED=bool(pair),
            IN_TREE=work.parents is not None,
            EACH_PAD=pad,
            BLOCK=block,
            num_warps=4,
        )


def _parents(work: Work) -> Tensor:
    """The tokens that those of a tree follow; of chains anything, which kernels do not read."""
    return work.ids if work.parents is None else work.parents
