"""The native runtime as a `Run` (`models/lm.py`): a pass is one call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.kv import LayerShape
from outrider.models.attention import PassPlan
from outrider.models.lm import LM
from outrider.models.probe import check_same_logits, probe_logits
from outrider.runtime import library
from outrider.runtime.binding import Binding
from outrider.runtime.blocks import DTYPES, NotLoweredError
from outrider.runtime.checked import one_thread
from outrider.runtime.lower import lower
from outrider.runtime.matrices import Matrix
from outrider.runtime.ops import Code, Program, Source
from outrider.runtime.structures import SIZES, DraftingStruct, PassStruct

ROTARY_BLOCK = 1024  # positions whose cosines and sines are made at once


class FirstPass(NamedTuple):
    """What the pass that catches up is fed, of rows that may end at different columns."""

    ids: Tensor  # (B, T)
    positions: np.ndarray  # (B, T) int64
    starts: np.ndarray  # (B,) int64, places that the cache holds
    columns: np.ndarray  # (B,) int64, each row's last
    inputs: tuple[Tensor, ...] = ()  # (B, T, size) each


class Executor:
    """A program bound to tensors, ready to be called; used by one thread at a time."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor | Matrix],
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        path: Path,
    ) -> None:
        self.program, self._dtype = program, dtype
        self._binding = Binding(program, tensors, layers, dtype)
        self.library = library.load(path)
        assert self.library.outrider_runtime_sizes() == SIZES, "structures.py and native/program.h differ"
        self._workers = library.workers(self.library, torch.get_num_threads())
        self._arena = torch.empty(0, dtype=torch.uint8)

    def run(
        self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor, layers: Sequence[int] = (),
        tables: Sequence[Tensor] = (), inputs: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Logits (B, K, V), fp32, and the hidden states (B, T, H) of these layers. `tables`: rotary, by position; `inputs`:
        (B, T, size) each."""
        num_rows, num_tokens = ids.shape
        ids, positions, columns = ids.contiguous(), positions.contiguous(), columns.contiguous()
        capacity = plan.keys[0].shape[1]
        starts = plan.places.view(num_rows, num_tokens)[:, 0].numpy() % capacity  # a pass lies behind its row's prefix
        depths, paths = (None, None) if plan.sees is None else _paths(plan.sees)
        assert self.program.logits is not None
        logits = torch.empty(num_rows, len(columns), self.program.logits.cols)
        hidden = {
            layer: torch.empty(num_rows, num_tokens, self.program.hidden_size, dtype=self._dtype) for layer in layers
        }
        signals = addresses([hidden.get(layer) for layer in self.program.signals])
        keys, values, rotary, given = (addresses(each) for each in (plan.keys, plan.values, tables, inputs))
        call = PassStruct(
            num_rows, num_tokens, capacity, ids.data_ptr(), positions.data_ptr(), starts.ctypes.data,
            None if depths is None else depths.ctypes.data, None if paths is None else paths.ctypes.data,
            *(ctypes.addressof(each) for each in (keys, values, rotary, given, signals)), columns.data_ptr(), len(columns), False,
            logits.data_ptr(), self._room(num_rows, num_tokens, len(columns)),
        )  # fmt: skip
        self.library.outrider_runtime_run(ctypes.addressof(self._binding.struct), ctypes.addressof(call), self._workers)
        return logits, [hidden[layer] for layer in layers]

    def draft(
        self, first: FirstPass, keys: Sequence[Tensor], values: Sequence[Tensor], tables: Sequence[Tensor],
        carried: Tensor | None, told: DraftingStruct,
    ) -> bool:  # fmt: skip
        """Make the chains that `told` says, behind this first pass; `carried` (B, T, H) is room for what it hands on. False where
        a row's scores are none to pick from."""
        num_rows, num_tokens = first.ids.shape
        assert self.program.logits is not None
        logits = torch.empty(num_rows, self.program.logits.cols)
        signals = addresses([carried, *[None] * (len(self.program.signals) - 1)])
        keys_at, values_at, rotary, inputs = (addresses(each) for each in (keys, values, tables, first.inputs))
        call = PassStruct(
            num_rows, num_tokens, keys[0].shape[1], first.ids.data_ptr(), first.positions.ctypes.data, first.starts.ctypes.data,
            None, None, *(ctypes.addressof(each) for each in (keys_at, values_at, rotary, inputs, signals)),
            first.columns.ctypes.data, 1, True, logits.data_ptr(), self._room(num_rows, num_tokens, 1),
        )  # fmt: skip
        at = (ctypes.addressof(each) for each in (self._binding.struct, call, told))
        return self.library.outrider_runtime_draft(*at, self._workers)

    def map(self, given: Tensor) -> Tensor:
        """The first signal (N, H) of a program without attention, of its one input (N, size)."""
        out = torch.empty(len(given), self.program.hidden_size, dtype=self._dtype)
        inputs, signals = addresses([given]), addresses([out, *[None] * (len(self.program.signals) - 1)])
        call = PassStruct(rows=1, tokens=len(given), inputs=ctypes.addressof(inputs), signals=ctypes.addressof(signals))
        call.arena = self._room(1, len(given), 0)
        self.library.outrider_runtime_run(ctypes.addressof(self._binding.struct), ctypes.addressof(call), self._workers)
        return out

    def _room(self, num_rows: int, num_tokens: int, num_columns: int) -> int:
        """Address of memory for the values of such a pass, kept for the next one."""
        needed = num_rows * (num_tokens * self._binding.body_bytes + num_columns * self._binding.head_bytes) + 64
        if self._arena.numel() < needed:
            self._arena = torch.empty(needed, dtype=torch.uint8)
        return -(-self._arena.data_ptr() // 64) * 64


class Bound(NamedTuple):
    """A program that can be called, and the tables of its rotary parts."""

    executor: Executor
    rotary: Rotary


def bind(program: Program, module: Any, layers: Sequence[LayerShape], dtype: torch.dtype, path: Path) -> Bound:
    """The program on the tensors of the module that it was lowered from."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers()), **program.constants}
    tensors = {name: tensor for name, tensor in named.items() if name in _named(program)}
    return Bound(Executor(program, {**tensors, **program.matrices}, layers, dtype, path), Rotary(module, program))


class NativeRun:
    """A model's passes on the executor. It keeps its own copy of the weights, and of the module only the rotary parts."""

    def __init__(self, lm: LM, module: Any, program: Program, path: Path) -> None:
        self.path = path
        self.bound = bind(program, module, lm.shape.layers, lm.dtype, path)

    @property
    def executor(self) -> Executor:
        return self.bound.executor

    def __call__(self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
        """Logits (B, K, V), fp32."""
        return self.with_hidden(ids, positions, plan, columns, ())[0]

    def with_hidden(
        self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (B, K, V), fp32, and the hidden states (B, T, H) of these layers, which change no other number."""
        if missing := sorted(set(layers) - set(self.executor.program.signals)):
            raise CapabilityError(f"the native runtime does not give the hidden states of layers {missing}")
        tables = self.bound.rotary.up_to(int(positions.max()))
        return self.executor.run(ids, positions, plan, columns, layers, tables)


def _named(program: Program) -> set[str]:
    """Tensors that a program reads."""
    ops = (*program.body, *program.head)
    return {name for op in ops for name in (op.weight, op.bias) if name} | {
        value.name for value in program.values if value.source == Source.CONSTANT
    }


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of tensors, null for None."""
    return (ctypes.c_void_p * len(tensors))(*(None if one is None else one.data_ptr() for one in tensors))


def _paths(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depths (B, T), and paths (B, T, T): the tokens on the way to each token, itself last; what lies behind is never read."""
    depths = (seen.sum(axis=2) - 1).astype(np.int32)
    paths = np.argsort(~seen, axis=2, kind="stable").astype(np.int32)  # ancestors stand before their descendants
    return depths, paths


class Rotary:
    """Cosines and sines by position, made by the model's own modules as far as texts have come."""

    def __init__(self, module: Any, program: Program) -> None:
        self._parts = [(module.get_submodule(path), further, which) for path, further, which in program.rotary]
        dtypes = {value.name: value.dtype for value in program.values if value.source == Source.ROTARY}
        self._dtypes = [dtypes[str(index)] for index in range(len(self._parts))]
        self._tables: list[Tensor] = []
        self._reach = 0

    def up_to(self, position: int) -> list[Tensor]:
        """Tables (positions, size) that reach this position at least."""
        if position >= self._reach and self._parts:
            self._reach = max(2 * self._reach, -(-(position + 1) // ROTARY_BLOCK) * ROTARY_BLOCK)
            positions = torch.arange(self._reach)[None]
            self._tables = []
            for (part, further, which), dtype in zip(self._parts, self._dtypes, strict=True):
                out = part(torch.empty(1, dtype=dtype), positions, *further)
                self._tables.append((out if isinstance(out, tuple) else (out,))[which][0].contiguous())
        return self._tables


def use_native_run(lm: LM, module: Any, cache: Path, *, is_checked: bool = False) -> NativeRun:
    """Run the model's passes on the executor from now on. Raises CapabilityError, with `lm` as it was, where that cannot be.

    `is_checked`: an earlier start has compared its logits with the plain module's.
    """
    if lm.device.type != "cpu" or lm.dtype not in DTYPES:
        dtype = str(lm.dtype).removeprefix("torch.")
        raise NotLoweredError(f"the native runtime runs bfloat16 and float32 on a CPU, not {dtype} on {lm.device.type}")
    path, before = library.find(cache), lm.run
    with one_thread(lm.shape.num_parameters):
        expected = None if is_checked else probe_logits(lm)
        program = lower(module)
    if program.matrices and lm.dtype != torch.bfloat16:
        raise NotLoweredError("weights kept in integers are multiplied in bfloat16 alone, with activations rounded to 8 bits")
    run = NativeRun(lm, module, program, path)
    lm.run = run
    try:
        if expected is not None:
            check_same_logits(lm, expected, picks_experts=any(op.code == Code.EXPERTS for op in program.body))
    except CapabilityError:
        lm.run = before
        raise
    lm.kernels = run.executor.library
    return run
