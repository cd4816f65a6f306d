"""The steps of a pass on the device, one after the other: products by torch, tokenwise kernels,
attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from outrider.kv import LayerShape
from outrider.models.pass_plan import PassPlan
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.gpu.kernels import attention_joined, attention_parts, expert_products
from outrider.runtime.gpu.products import NARROW, narrow
from outrider.runtime.gpu.recurrent import Recurrence
from outrider.runtime.gpu.source import kernel_text
from outrider.runtime.gpu.value_offsets import joinable, offsets_of, read_elsewhere
from outrider.runtime.gpu.work import Work, compiled
from outrider.runtime.gpu.writer import SPLIT, Argument
from outrider.runtime.ops import Code, Op, Program, View
from outrider.runtime.schedule import Kind, Phase, schedule

# queries, times the heads of a group, of one program of attention; the latter in wide passes
LINES = 16
WIDE_LINES = 64
# keys of one program of attention
PART = 128
WIDE_PART = 512
JOINED = 16  # parts read at once
EXPERT_BLOCK = 32
EXPERT_STEP = 128


Step = Callable[[Work], None]


class Steps:
    """The steps of a program. `tensors`: parameters, buffers and constants by name, on the device."""

    def __init__(
        self, program: Program, tensors: Mapping[str, Tensor], layers: Sequence[LayerShape]
    ) -> None:
        self._program = program
        self._tensors = tensors
        self._layers = layers
        phases = schedule(program).phases
        self._offsets = offsets_of(program, phases)
        outside = read_elsewhere(program, phases)
        self._steps: list[Step] = []
        last: dict[int, int] = {}
        for phase, wanted in zip(phases, outside, strict=True):
            self._steps += self._of(phase, wanted)
            last.update(dict.fromkeys(self._touched(phase), len(self._steps) - 1))
        self._forgotten: dict[int, list[int]] = {}
        assert program.logits is not None
        kept_tensors = {self._offsets[program.logits.value].tensor}
        for tensor, number in last.items():
            if tensor not in kept_tensors:
                self._forgotten.setdefault(number, []).append(tensor)

    def run(self, work: Work) -> Tensor:
        """Logits (rows * columns, V)."""
        for number, step in enumerate(self._steps):
            step(work)
            for tensor in self._forgotten.get(number, ()):
                work.tensors.pop(tensor, None)
        assert self._program.logits is not None
        return self.view(work, self._program.logits)

    def view(self, work: Work, view: View) -> Tensor:
        """(tokens, numbers) of a dense view."""
        at = self._offsets[view.value]
        begin = at.offset + view.offset
        return work.tensors[at.tensor][:, begin : begin + view.rows * view.cols]

    def _touched(self, phase: Phase) -> set[int]:
        views = [
            view
            for op in phase.ops
            for view in (*op.inputs, *([op.output] if op.output is not None else []))
        ]
        return {self._offsets[view.value].tensor for view in views if view.value in self._offsets}

    def _of(self, phase: Phase, wanted: frozenset[int]) -> list[Step]:
        if phase.kind == Kind.LINEARS:
            return [self._linear(ops) for ops in joinable(phase)]
        if phase.kind == Kind.ATTENTIONS:
            return [self._attention(op) for op in phase.ops]
        if phase.kind == Kind.RECURRENT:
            return [Recurrence(op, self._program, self._offsets, self._tensors) for op in phase.ops]
        if phase.kind == Kind.EXPERTS:
            return [
                self._heads(op) if op.code == Code.HEADS else self._experts(op) for op in phase.ops
            ]
        steps = (
            [self._tokenwise(phase, wanted)]
            if any(op.code != Code.SIGNAL for op in phase.ops)
            else []
        )
        return [*steps, *(self._signal(op) for op in phase.ops if op.code == Code.SIGNAL)]

    def _signal(self, op: Op) -> Step:
        def step(work: Work) -> None:
            if op.layer in work.hidden:
                work.hidden[op.layer] = self.view(work, op.inputs[0]).contiguous()

        return step

    def _linear(self, ops: Sequence[Op]) -> Step:
        weights = [self._tensors[op.weight] for op in ops]
        weight = weights[0].t() if ops[0].transposed else joined(weights)
        bias = joined([self._tensors[op.bias] for op in ops]) if ops[0].bias else None
        output = ops[0].output
        assert output is not None
        view = ops[0].inputs[0]
        tensor = self._offsets[output.value].tensor
        multiply = (
            narrow(weight, bias)
            if weight.dtype == torch.bfloat16 and weight.is_contiguous()
            else None
        )

        def step(work: Work) -> None:
            x = self.view(work, view)
            work.tensors[tensor] = (
                multiply(x) if multiply and len(x) <= NARROW else F.linear(x, weight, bias)
            )

        return step

    def _tokenwise(self, phase: Phase, wanted: frozenset[int]) -> Step:
        text = kernel_text(phase.ops, self._program, self._offsets, wanted)
        kernel = compiled(text.text)
        fresh = [
            (self._offsets[value], self._program.values[value].dtype)
            for value in sorted(text.stored)
        ]
        programs = triton.cdiv(text.columns, SPLIT) if text.columns else text.programs
        warps = min(16, max(1 if text.tile <= 128 else 4, text.tile // 1024))

        def step(work: Work) -> None:
            count = work.num_rows * len(work.columns) if phase.is_head else work.count
            for at, dtype in fresh:
                if at.tensor not in work.tensors:
                    work.tensors[at.tensor] = torch.empty(
                        count, at.width, dtype=dtype, device=work.ids.device
                    )
            given = [self._given(work, argument) for argument in text.arguments]
            kernel[(count, programs)](len(work.columns), work.num_tokens, *given, num_warps=warps)

        return step

    def _given(self, work: Work, argument: Argument) -> Tensor:
        kind, what = argument
        if isinstance(what, str):
            return self._tensors[what]
        if kind == "tensor":
            return work.tensors[what]
        lists = {"rotary": work.rotary, "keys": work.plan.keys, "values": work.plan.values}
        if kind in lists:
            return lists[kind][what]
        if kind == "indices":
            return self._indices(work.plan, what)
        return {"ids": work.ids, "positions": work.positions, "columns": work.columns}[kind]

    def _indices(self, plan: PassPlan, layer: int) -> Tensor:
        """The places of the pass in this layer."""
        return (
            plan.indices
            if plan.short is None or self._layers[layer].window is None
            else plan.short.indices
        )

    def _attention(self, op: Op) -> Step:
        assert op.output is not None
        if op.weight:
            raise NotLoweredError("attention with slopes (ALiBi) on a CUDA device")
        sinks = self._sinks(op)
        layer = self._layers[op.layer]
        at = self._offsets[op.inputs[0].value]
        out = self._offsets[op.output.value]
        view = op.inputs[0]
        dtype = self._program.values[op.output.value].dtype
        heads = op.heads
        kv_heads = layer.num_kv_heads
        size = layer.key_size
        value_size = layer.value_size
        in_keys = layer.values_in_keys
        # such keys are long, but read once
        keys_at_once = (64 if dtype == torch.bfloat16 else 32) // (2 if in_keys else 1)

        def step(work: Work) -> None:
            plan = work.plan
            tokens = work.num_tokens
            device = work.ids.device
            masked = plan.chain_keys is None
            mask = plan.indices
            num_keys = plan.chain_keys
            indices = self._indices(plan, op.layer)
            short = plan.short if layer.window is not None else None
            if num_keys is None:
                mask = plan.mask if not op.window or plan.window_mask is None else plan.window_mask
                num_keys = mask.shape[3] if short is None else plan.mask.shape[3]
            lines = tokens * (heads // kv_heads)
            is_narrow = work.count <= NARROW
            part = PART if is_narrow else WIDE_PART
            block = (
                WIDE_LINES if dtype == torch.bfloat16 and not is_narrow and not in_keys else LINES
            )
            num_parts = triton.cdiv(num_keys, part)
            parts = torch.empty(
                work.count * heads, num_parts, value_size, dtype=torch.float32, device=device
            )
            sums = torch.empty(work.count * heads, num_parts, 2, dtype=torch.float32, device=device)
            grid = (work.num_rows * kv_heads, num_parts, triton.cdiv(lines, block))
            attention_parts[grid](
                work.tensors[at.tensor],
                plan.keys[op.layer],
                (plan.keys if in_keys else plan.values)[op.layer],
                mask,
                indices,
                indices if short is None else short.bases,
                parts,
                sums,
                tokens,
                plan.keys[op.layer].shape[1],
                num_keys,
                mask.shape[3] if masked else 0,
                num_parts,
                op.scale,
                SHORT=short is not None,
                QUERY_WIDTH=at.width,
                QUERY_OFFSET=at.offset + view.offset,
                QUERY_STEP=view.row_step,
                HEADS=heads,
                KV_HEADS=kv_heads,
                SIZE=size,
                VALUE_SIZE=value_size,
                SIZE_PAD=_padded(value_size if in_keys else size),
                VALUE_PAD=_padded(value_size),
                IN_KEYS=in_keys,
                REST_PAD=_padded(size - value_size) if in_keys else 16,
                MASKED=masked,
                MASK_TOKENS=mask.shape[2] if masked else 1,
                WINDOW=op.window,
                SEES_ALL=op.sees_all,
                SOFTCAP=op.softcap,
                PART=part,
                BLOCK=keys_at_once,
                LINES=block,
                num_warps=4,
            )
            output = torch.empty(work.count, out.width, dtype=dtype, device=device)
            attention_joined[(work.count * heads,)](
                parts,
                sums,
                sums if sinks is None else sinks,
                output,
                num_parts,
                HEADS=heads,
                HAS_SINKS=sinks is not None,
                VALUE_SIZE=value_size,
                VALUE_PAD=triton.next_power_of_2(value_size),
                BLOCK=JOINED,
                num_warps=2,
            )
            work.tensors[out.tensor] = output

        return step

    def _sinks(self, op: Op) -> Tensor | None:
        """The score of each head's sink (heads,); None where attention has none."""
        if len(op.inputs) == 1:
            return None
        view = op.inputs[1]
        constant = self._tensors[self._program.values[view.value].name].reshape(-1)
        return constant[view.offset :: view.col_step][: view.cols].contiguous()

    def _experts(self, op: Op) -> Step:
        assert op.output is not None
        x = op.inputs[0]
        chosen = op.inputs[1]
        out = self._offsets[op.output.value]
        weight = self._tensors[op.weight]
        bias = self._tensors[op.bias] if op.bias else None
        source = self._offsets[x.value]
        index = self._offsets[chosen.value]
        rows = op.output.rows
        outputs = op.output.cols
        dtype = self._program.values[op.output.value].dtype

        def step(work: Work) -> None:
            output = torch.empty(work.count, out.width, dtype=dtype, device=work.ids.device)
            expert_products[(work.count * rows, triton.cdiv(outputs, EXPERT_BLOCK))](
                work.tensors[source.tensor],
                work.tensors[index.tensor],
                weight,
                weight if bias is None else bias,
                output,
                X_WIDTH=source.width,
                X_OFFSET=source.offset + x.offset,
                X_STEP=x.row_step,
                CHOSEN_WIDTH=index.width,
                CHOSEN_OFFSET=index.offset + chosen.offset,
                ROWS=rows,
                INPUTS=x.cols,
                OUTPUTS=outputs,
                TRANSPOSED=op.transposed,
                BIASED=bias is not None,
                BLOCK=EXPERT_BLOCK,
                STEP=EXPERT_STEP,
                WEIGHT_STEP=x.cols * outputs,
                NAMED=True,
                num_warps=4,
            )
            work.tensors[out.tensor] = output

        return step

    def _heads(self, op: Op) -> Step:
        """A product of each head. Many tokens are a library's: their sums may run in another order."""
        assert op.output is not None
        x = op.inputs[0]
        source = self._offsets[op.inputs[0].value]
        out = self._offsets[op.output.value]
        weight = self._tensors[op.weight].unflatten(0, (op.heads, -1))[:, slice(*op.part)]
        by_input = weight if op.transposed else weight.transpose(1, 2)
        outputs = op.output.cols
        dtype = weight.dtype

        def step(work: Work) -> None:
            given = work.tensors[source.tensor]
            if work.count > NARROW:
                rows = given.as_strided(
                    (op.heads, work.count, x.cols),
                    (x.row_step, source.width, 1),
                    source.offset + x.offset,
                )
                work.tensors[out.tensor] = torch.bmm(rows, by_input).transpose(0, 1).flatten(1)
                return
            output = torch.empty(work.count, out.width, dtype=dtype, device=work.ids.device)
            expert_products[(work.count * op.heads, triton.cdiv(outputs, EXPERT_BLOCK))](
                given,
                given,
                weight,
                weight,
                output,
                X_WIDTH=source.width,
                X_OFFSET=source.offset + x.offset,
                X_STEP=x.row_step,
                CHOSEN_WIDTH=0,
                CHOSEN_OFFSET=0,
                ROWS=op.heads,
                INPUTS=x.cols,
                OUTPUTS=outputs,
                TRANSPOSED=op.transposed,
                BIASED=False,
                BLOCK=EXPERT_BLOCK,
                STEP=EXPERT_STEP,
                WEIGHT_STEP=weight.stride(0),
                NAMED=False,
                num_warps=4,
            )
            work.tensors[out.tensor] = output

        return step


def _padded(size: int) -> int:
    """The size that tensor cores take: a power of two."""
    return max(16, triton.next_power_of_2(size))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Weights below one another, which from now on are views of what is returned: no weight lies in
    memory twice."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole
