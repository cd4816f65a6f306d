"""Samples in which another order of a sum shows, of linear layers and of attention on the executor
(`probes/sum_order.py`).

A sample is a small program of its own, whose inputs are the rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from outrider.kv import KVCache, LayerShape
from outrider.models.plan import plan_pass
from outrider.models.probes.sum_order import FEW_NUMBERS, NUMBERS, TREE_NODES, AttentionKind, Sample
from outrider.runtime.ops import Code, Op, Program, Source, Value, View
from outrider.runtime.run import Executor

UNIT_SHAPE = LayerShape(1, 2, 2)  # of a cache that nobody reads
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 40, 72, 200)  # tokens of a pass
ROWS = max(TREE_NODES + 1, *WIDTHS)


def linear_sample(
    weight: Tensor, bias: Tensor | None, path: Path, *, transposed: bool = False
) -> Sample:
    """Tokens in a pass -> what the executor's linear layer gives of the same random inputs."""
    multiply = executors_linear(weight, bias, path, transposed=transposed)
    outputs = weight.shape[1] if transposed else weight.shape[0]
    count = -(-NUMBERS.get(weight.dtype, FEW_NUMBERS) // outputs)
    return {
        width: torch.cat([multiply(start, width) for start in range(0, count, width)])[:count]
        for width in WIDTHS
    }


def executors_linear(
    weight: Tensor, bias: Tensor | None, path: Path, *, transposed: bool = False
) -> Callable[[int, int], Tensor]:
    """(first input, number of them) -> outputs (tokens, outputs), fp32, of one pass."""
    outputs, inputs = tuple(weight.shape)[:: -1 if transposed else 1]
    tables = {"x": sample_inputs(weight, inputs, outputs), "w": weight} | (
        {} if bias is None else {"b": bias}
    )
    row = View(0, 1, inputs, 0, inputs)
    out = View(1, 1, outputs, 0, outputs)
    sample = Program(
        values=[
            Value(inputs, weight.dtype),
            Value(outputs, weight.dtype),
            Value(outputs, weight.dtype),
        ],
        body=[
            Op(Code.EMBED, (), row, weight="x"),
            Op(
                Code.LINEAR,
                (row,),
                out,
                weight="w",
                bias="" if bias is None else "b",
                transposed=transposed,
            ),
        ],
        head=[Op(Code.GATHER, (out,), View(2, 1, outputs, 0, outputs))],
        logits=View(2, 1, outputs, 0, outputs),
    )
    executor = Executor(sample, tables, [UNIT_SHAPE], weight.dtype, path)
    kv = KVCache([UNIT_SHAPE], weight.dtype, "cpu")
    kv.add_row()

    def multiply(start: int, width: int) -> Tensor:
        plan, positions = plan_pass(kv, 1, width, last_position=1 << 20)
        columns = torch.arange(width)
        return executor.run(start + columns[None], positions, plan, columns)[0][0]

    return multiply


def sample_inputs(weight: Tensor, inputs: int, outputs: int) -> Tensor:
    """(tokens, inputs): enough for every width, always the same."""
    count = -(-NUMBERS.get(weight.dtype, FEW_NUMBERS) // outputs) + max(WIDTHS)
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs)).to(
        weight.dtype
    )


class NativeAttention:
    """The executor's attention by itself, as `sum_order.Attend`."""

    def __init__(
        self, kind: AttentionKind, dtype: torch.dtype, path: Path, rows: int = ROWS, window: int = 0
    ) -> None:
        shape = kind.shape
        sizes = (
            kind.num_heads * shape.key_size,
            shape.num_kv_heads * shape.key_size,
            shape.num_kv_heads * shape.value_size,
        )
        self._tables = {
            name: torch.zeros(rows, size, dtype=dtype)
            for name, size in zip("qkv", sizes, strict=True)
        }
        sinks = kind.sinks()
        slopes = kind.slopes()
        out = kind.num_heads * shape.value_size
        query = View(0, kind.num_heads, shape.key_size, 0, shape.key_size)
        key = View(1, shape.num_kv_heads, shape.key_size, 0, shape.key_size)
        value = View(2, shape.num_kv_heads, shape.value_size, 0, shape.value_size)
        program = Program(
            values=[
                *(Value(size, dtype) for size in (*sizes, out, out)),
                Value(kind.num_heads, torch.float32, Source.CONSTANT, "sinks"),
            ],
            body=[
                *(
                    Op(Code.EMBED, (), View(i, 1, size, 0, size), weight="qkv"[i])
                    for i, size in enumerate(sizes)
                ),
                Op(Code.STORE, (key,), None),
                *([] if shape.values_in_keys else [Op(Code.STORE, (value,), None, is_value=True)]),
                Op(
                    Code.ATTENTION,
                    (query,) if sinks is None else (query, View(5, 1, kind.num_heads)),
                    View(3, kind.num_heads, shape.value_size, 0, shape.value_size),
                    heads=kind.num_heads,
                    softcap=kind.softcap or 0.0,
                    window=window,
                    weight="" if slopes is None else "slopes",
                ),
            ],
            head=[Op(Code.GATHER, (View(3, 1, out, 0, out),), View(4, 1, out, 0, out))],
            logits=View(4, 1, out, 0, out),
        )
        constants = {
            name: one for name, one in (("sinks", sinks), ("slopes", slopes)) if one is not None
        }
        self._executor = Executor(program, self._tables | constants, [shape], dtype, path)

    def __call__(
        self, kv: KVCache, query: Tensor, key: Tensor, value: Tensor, parents: Tensor | None
    ) -> Tensor:
        """query, key, value (1, heads, tokens, size) -> (tokens, heads * value size), fp32."""
        width = query.shape[2]
        for table, tensor in zip(self._tables.values(), (query, key, value), strict=True):
            table[:width] = tensor[0].transpose(0, 1).reshape(width, -1)
        plan, positions = plan_pass(kv, 1, width, parents, last_position=1 << 20)
        columns = torch.arange(width)
        return self._executor.run(columns[None], positions, plan, columns)[0][0]


def with_sinks(scores: Tensor, kind: AttentionKind) -> Tensor:
    """Scores (heads, tokens, keys) with the kind's sinks as one more key, the last."""
    sinks = kind.sinks()
    return (
        scores
        if sinks is None
        else torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:2], 1)], dim=-1)
    )
