"""Which passes keep a row's bits on the executor: measured, as `models/pass_limits.py` does for torch's kernels.

The evidence is of the same two kinds. Whole passes of the model, in every shape; and samples in which another order of a sum
shows, of each shape of linear layer and each kind of attention. A sample is a small program of its own: its inputs are the rows
of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.kv import KVCache, LayerShape
from outrider.models.lm import LM, PassLimits
from outrider.models.pass_limits import PREFIX, WIDTHS, neighbours_do_not_matter, tree_path_is_exact
from outrider.models.plan import plan_pass
from outrider.models.probe import probe_tokens
from outrider.models.sum_order import (
    FEW_NUMBERS,
    NUMBERS,
    TREE_NODES,
    AttentionKind,
    Sample,
    attention_kinds,
    attention_samples,
    same_bits,
    trees_keep_bits,
)
from outrider.runtime.ops import Code, Op, Program, Value, View
from outrider.runtime.run import Executor, NativeRun

UNIT_SHAPE = LayerShape(1, 2, 2)  # of a cache that nobody reads


@torch.inference_mode()
def find_native_limits(lm: LM, run: NativeRun, config: Any) -> PassLimits:
    """Pass shapes among which a row's bits do not change on `run`, which is `lm.run`. The cache is empty, before and after."""
    longest = max(WIDTHS)
    tokens = probe_tokens(lm.shape.vocab_size, PREFIX + longest, lm.device)
    lm.limits = PassLimits(granularity=1)
    for _ in range(2):
        lm.kv.add_row()
    lm.catch_up([tokens[0, : PREFIX + 1].tolist(), tokens[0, : PREFIX // 2 + 1].tolist()])
    block = tokens[:, PREFIX:]
    exact_trees, exact_rows = tree_path_is_exact(lm, block), neighbours_do_not_matter(lm, block)
    alone = {width: lm.forward(block[:, :width])[0] for width in WIDTHS}
    beside = lm.forward(block[:, :8].repeat(2, 1))[0]
    lm.kv.advance(0, longest - 8)
    late = lm.forward(block[:, longest - 8 :])[0]  # tokens that stood at the end of the longest pass
    for _ in range(2):
        lm.kv.swap_remove(0)
    samples: list[Sample] = [alone, *linear_samples(lm, run)]
    for kind in attention_kinds(config.get_text_config(), lm.shape.layers):
        attend = NativeAttention(kind, lm.dtype, run.path)
        samples += attention_samples(kind, lm, WIDTHS, attend)
        exact_trees = exact_trees and trees_keep_bits(kind, lm, attend)
    agreed = [1]
    for width in WIDTHS[1:]:
        if not all(same_bits(sample, [*agreed, width]) for sample in samples):
            break
        agreed.append(width)
    if not (torch.equal(beside, alone[8]) and torch.equal(late, alone[longest][-8:])):
        agreed = agreed[:1]
    return PassLimits(1, agreed[-1], exact_trees, exact_rows and agreed[-1] == longest)


def linear_samples(lm: LM, run: NativeRun) -> Iterator[Sample]:
    """One sample per shape of linear layer, with the model's own weights and random inputs."""
    program, seen = run.executor.program, set[tuple[object, ...]]()
    for op in (*program.body, *program.head):
        if op.code != Code.LINEAR:
            continue
        shape = (tuple(run.tensors[op.weight].shape), op.transposed, bool(op.bias))
        if shape not in seen:
            seen.add(shape)
            yield _linear_sample(op, program, run, lm.dtype)


def _linear_sample(op: Op, program: Program, run: NativeRun, dtype: torch.dtype) -> Sample:
    assert op.output is not None
    inputs, outputs = program.values[op.inputs[0].value].size, op.output.cols
    count = -(-NUMBERS.get(dtype, FEW_NUMBERS) // outputs)
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(count + max(WIDTHS), inputs, generator=generator).to(dtype)
    tables = {"x": x, **{name: run.tensors[name] for name in (op.weight, op.bias) if name}}
    row, out = View(0, 1, inputs, 0, inputs), View(1, 1, outputs, 0, outputs)
    sample = Program(
        values=[Value(inputs, dtype), Value(outputs, dtype), Value(outputs, dtype)],
        body=[
            Op(Code.EMBED, (), row, weight="x"),
            Op(Code.LINEAR, (row,), out, weight=op.weight, bias=op.bias, transposed=op.transposed),
        ],
        head=[Op(Code.GATHER, (out,), View(2, 1, outputs, 0, outputs))],
        logits=View(2, 1, outputs, 0, outputs),
    )
    executor, kv = Executor(sample, tables, [UNIT_SHAPE], dtype, run.path), KVCache([UNIT_SHAPE], dtype, "cpu")
    kv.add_row()

    def passes(width: int) -> Tensor:
        plan, positions = plan_pass(kv, 1, width, last_position=1 << 20)
        columns = torch.arange(width)
        starts = range(0, count, width)
        return torch.cat([executor.run(start + columns[None], positions, plan, columns)[0][0] for start in starts])

    return {width: passes(width) for width in WIDTHS}


class NativeAttention:
    """The executor's attention by itself, as `sum_order.Attend`."""

    def __init__(self, kind: AttentionKind, dtype: torch.dtype, path: Path) -> None:
        shape = kind.shape
        sizes = (
            kind.num_heads * shape.key_size,
            shape.num_kv_heads * shape.key_size,
            shape.num_kv_heads * shape.value_size,
        )
        rows = max(TREE_NODES + 1, *WIDTHS)
        self._tables = {name: torch.zeros(rows, size, dtype=dtype) for name, size in zip("qkv", sizes, strict=True)}
        out = kind.num_heads * shape.value_size
        query = View(0, kind.num_heads, shape.key_size, 0, shape.key_size)
        key = View(1, shape.num_kv_heads, shape.key_size, 0, shape.key_size)
        value = View(2, shape.num_kv_heads, shape.value_size, 0, shape.value_size)
        program = Program(
            values=[Value(size, dtype) for size in (*sizes, out, out)],
            body=[
                *(Op(Code.EMBED, (), View(i, 1, size, 0, size), weight="qkv"[i]) for i, size in enumerate(sizes)),
                Op(Code.STORE, (key,), None),
                Op(Code.STORE, (value,), None, is_value=True),
                Op(
                    Code.ATTENTION, (query,), View(3, kind.num_heads, shape.value_size, 0, shape.value_size),
                    heads=kind.num_heads, softcap=kind.softcap or 0.0,
                ),
            ],
            head=[Op(Code.GATHER, (View(3, 1, out, 0, out),), View(4, 1, out, 0, out))],
            logits=View(4, 1, out, 0, out),
        )  # fmt: skip
        self._executor = Executor(program, self._tables, [shape], dtype, path)

    def __call__(self, kv: KVCache, query: Tensor, key: Tensor, value: Tensor, parents: Tensor | None) -> Tensor:
        """query, key, value (1, heads, tokens, size) -> (tokens, heads * value size), fp32."""
        width = query.shape[2]
        for table, tensor in zip(self._tables.values(), (query, key, value), strict=True):
            table[:width] = tensor[0].transpose(0, 1).reshape(width, -1)
        plan, positions = plan_pass(kv, 1, width, parents, last_position=1 << 20)
        columns = torch.arange(width)
        return self._executor.run(columns[None], positions, plan, columns)[0][0]
