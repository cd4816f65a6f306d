"""The native runtime as a `Run` (`models/lm.py`): a pass is one call."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.kv import LayerShape
from outrider.kv.state_slots import StatePass
from outrider.models.lm import LM
from outrider.models.pass_plan import PassPlan
from outrider.models.probes.probe import check_same_logits, probe_logits
from outrider.runtime import library
from outrider.runtime.binding import Binding
from outrider.runtime.blocks import DTYPES, NotLoweredError
from outrider.runtime.checked import one_thread
from outrider.runtime.coding import coder_for
from outrider.runtime.lower import lower
from outrider.runtime.matrices import Matrix, PackedWeight
from outrider.runtime.ops import Code, Program, Source
from outrider.runtime.rotary import Rotary, rotary_of
from outrider.runtime.structures import (
    SIZES,
    DraftingStruct,
    GrowingStruct,
    PassStruct,
    ProgramStruct,
)
from outrider.runtime.torch_threads import OnOwnThreads
from outrider.runtime.windows import keep_windows, within

Memory = Tensor | np.ndarray  # contiguous


class FirstPass(NamedTuple):
    """The tokens of the pass that catches up, of rows that may end at different columns."""

    ids: Tensor  # (B, T)
    positions: np.ndarray  # (B, T) int64
    starts: np.ndarray  # (B,) int64, positions that the cache holds
    columns: np.ndarray  # (B,) int64, each row's last
    inputs: tuple[Tensor, ...] = ()  # (B, T, size) each


@dataclass(slots=True)
class PassInputs:
    """The memory that one pass reads and writes, all of it contiguous.

    Signals that are left out are not wanted. `sees` is as in `PassPlan`, `bases` as in `ShortSlots`.
    `largest`: a row's tokens and columns in the largest pass that the arena must have room for.
    """

    num_rows: int
    num_tokens: int
    num_columns: int = 0
    keys: Sequence[Tensor] = ()
    values: Sequence[Tensor] = ()
    tables: Sequence[Tensor] = ()  # rotary, by position
    inputs: Sequence[Tensor] = ()  # (B, T, size) each
    signals: Sequence[Tensor | None] = ()
    ids: Memory | None = None
    positions: Memory | None = None
    starts: np.ndarray | None = None
    columns: Memory | None = None
    rows_differ: bool = False
    logits: Tensor | None = None
    sees: np.ndarray | None = None
    state_pass: StatePass | None = None
    bases: Tensor | None = None
    experts_read: np.ndarray | None = None  # (1,) int64
    largest: tuple[int, int] = (0, 0)


class Executor:
    """A program bound to tensors, ready to be called by any thread: passes on the same workers wait
    for one another."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor | Matrix | PackedWeight],
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        path: Path,
    ) -> None:
        self.program = program
        self.dtype = dtype
        self.library = library.load(path)
        assert self.library.outrider_runtime_sizes() == SIZES, (
            "structures.py and native/program.h differ"
        )
        threads = torch.get_num_threads()
        self.workers = library.workers(self.library, threads)
        coder = coder_for(path, self.library, threads, _matrix_bytes(program, tensors))
        with one_thread(
            sum(tensor.numel() for tensor in tensors.values() if isinstance(tensor, Tensor))
        ):
            self._binding = Binding(program, tensors, layers, dtype, coder)
        dtypes = {
            op.layer: program.values[op.inputs[0].value].dtype
            for op in program.body
            if op.code == Code.SIGNAL
        }
        # by key; layers may be added up in fp32 in a model of bf16
        self._signal_types = {
            key: dtypes.get(number, dtype) for number, key in enumerate(program.signals)
        }
        windows = [shape.window for shape in layers]
        self._whole = windows.index(None) if None in windows else None  # a layer without a window
        # and one with
        self._short = next((layer for layer, window in enumerate(windows) if window is not None), 0)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._num_products = sum(op.code == Code.EXPERTS for op in program.body)
        # distinct experts that the latest pass read, the mean of its layers; None: there are none
        self.experts_read: float | None = None
        # of keys, values, rotary tables, states and records
        self._lists = tuple(KeptAddresses() for _ in range(5))

    def within(self, window: int) -> Executor:
        """This program on the same weights, where no token sees more than the last `window`
        positions, over a cache whose layers keep no others."""
        twin = copy.copy(self)
        twin.program = within(self.program, window)
        twin._binding = self._binding.within(window)
        twin._whole, twin._short = None, 0
        twin._arena = torch.empty(0, dtype=torch.uint8)
        twin._lists = tuple(KeptAddresses() for _ in range(5))
        return twin

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: PassPlan,
        columns: Tensor,
        layers: Sequence[int] = (),
        tables: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (B, K, V), fp32, and the hidden states (B, T, H) of these layers. `tables`:
        rotary, by position; `inputs`: (B, T, size) each."""
        assert plan.starts is not None, "a plan of `plan_pass`"
        num_rows, num_tokens = ids.shape
        logits = self.logits(num_rows, len(columns))
        hidden = {
            key: torch.empty(
                num_rows, num_tokens, self.program.hidden_size, dtype=self._signal_types[key]
            )
            for key in layers
        }
        experts_read = np.zeros(1, dtype=np.int64) if self._num_products else None
        call = self.call(
            PassInputs(
                num_rows,
                num_tokens,
                len(columns),
                keys=plan.keys,
                values=plan.values,
                tables=tables,
                inputs=inputs,
                signals=[hidden.get(layer) for layer in self.program.signals],
                ids=ids.contiguous(),
                positions=positions.contiguous(),
                starts=np.array(plan.starts),
                columns=columns.contiguous(),
                logits=logits,
                sees=plan.sees,
                state_pass=plan.states,
                bases=None if plan.short is None else plan.short.bases,
                experts_read=experts_read,
            )
        )
        self.make(call)
        if experts_read is not None:
            self.experts_read = int(experts_read[0]) / self._num_products
        # asked first: even a conversion to the same type is an operation of torch
        return logits, [
            states if states.dtype == self.dtype else states.to(self.dtype)
            for states in hidden.values()
        ]

    def draft(
        self,
        first: FirstPass,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        tables: Sequence[Tensor],
        carried: Tensor | None,
        drafting: DraftingStruct,
        states: StatePass | None = None,
        bases: Tensor | None = None,
    ) -> bool:
        """Make the chains that `drafting` says, after this first pass. `carried` (B, T, H) is room
        for what it hands on; `states` has the moves of all passes, `bases` are as in `ShortSlots`.
        False where a row's scores are none to pick from."""
        num_rows, num_tokens = first.ids.shape
        call = self.call(
            PassInputs(
                num_rows,
                num_tokens,
                1,
                keys=keys,
                values=values,
                tables=tables,
                inputs=first.inputs,
                signals=[carried],
                ids=first.ids,
                positions=first.positions,
                starts=first.starts,
                columns=first.columns,
                rows_differ=True,
                logits=self.logits(num_rows, 1),
                state_pass=states,
                bases=bases,
            )
        )
        at = (ctypes.addressof(each) for each in (self.struct, call, drafting))
        return self.library.outrider_runtime_draft(*at, self.workers)

    def grow(
        self,
        first: FirstPass,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        tables: Sequence[Tensor],
        carried: Tensor | None,
        growing: GrowingStruct,
        largest: tuple[int, int],
        bases: Tensor | None = None,
    ) -> bool:
        """Grow the trees that `growing` says, after this first pass, as `draft` makes chains.
        `largest`: tokens and columns of a row in the largest pass, for which `carried` has room."""
        num_rows, num_tokens = first.ids.shape
        call = self.call(
            PassInputs(
                num_rows,
                num_tokens,
                1,
                keys=keys,
                values=values,
                tables=tables,
                inputs=first.inputs,
                signals=[carried],
                ids=first.ids,
                positions=first.positions,
                starts=first.starts,
                columns=first.columns,
                rows_differ=True,
                logits=self.logits(num_rows, largest[1]),
                bases=bases,
                largest=largest,
            )
        )
        at = (ctypes.addressof(each) for each in (self.struct, call, growing))
        return self.library.outrider_runtime_grow(*at, self.workers)

    def map(self, given: Tensor) -> Tensor:
        """The first signal (N, H) of a program without attention, of its one input (N, size)."""
        out = torch.empty(len(given), self.program.hidden_size, dtype=self.dtype)
        self.make(self.call(PassInputs(1, len(given), inputs=[given], signals=[out])))
        return out

    def call(self, pass_inputs: PassInputs) -> PassStruct:
        """A pass as the library reads it, with room for its values. The structure keeps alive what
        it points to."""
        keys = pass_inputs.keys
        state_pass = pass_inputs.state_pass
        wanted = [
            *pass_inputs.signals,
            *[None] * (len(self.program.signals) - len(pass_inputs.signals)),
        ]
        types = self._signal_types.values()
        assert all(
            each is None or each.dtype == dtype for each, dtype in zip(wanted, types, strict=True)
        ), "room of another type"
        stores: list[Sequence[Tensor]] = [keys, pass_inputs.values, pass_inputs.tables]
        stores += [(), ()] if state_pass is None else [state_pass.states, state_pass.records]
        known = [buffer(tensors) for buffer, tensors in zip(self._lists, stores, strict=True)]
        inputs = addresses(pass_inputs.inputs)
        signals = addresses(wanted)
        depths, paths = (None, None) if pass_inputs.sees is None else _paths(pass_inputs.sees)
        # of this pass, whatever a pass of another thread may need: their turns follow one another
        arena = self._arena_for(pass_inputs)
        pass_struct = PassStruct(
            rows=pass_inputs.num_rows,
            tokens=pass_inputs.num_tokens,
            capacity=keys[self._whole or 0].shape[1] if keys else 0,
            ids=_address(pass_inputs.ids),
            positions=_address(pass_inputs.positions),
            starts=_address(pass_inputs.starts),
            depths=_address(depths),
            paths=_address(paths),
            keys=ctypes.addressof(known[0]),
            values=ctypes.addressof(known[1]),
            tables=ctypes.addressof(known[2]),
            inputs=ctypes.addressof(inputs),
            states=ctypes.addressof(known[3]),
            records=ctypes.addressof(known[4]),
            moves=None if state_pass is None else _address(state_pass.moves),
            num_records=0 if state_pass is None else state_pass.num_records,
            signals=ctypes.addressof(signals),
            columns=_address(pass_inputs.columns),
            num_columns=pass_inputs.num_columns,
            rows_differ=pass_inputs.rows_differ,
            bases=_address(pass_inputs.bases),
            short_capacity=0 if pass_inputs.bases is None else keys[self._short].shape[1],
            logits=_address(pass_inputs.logits),
            arena=-(-arena.data_ptr() // 64) * 64,
            experts_read=_address(pass_inputs.experts_read),
        )
        pass_struct.kept = (pass_inputs, known, inputs, signals, depths, paths, arena)
        return pass_struct

    def _arena_for(self, pass_inputs: PassInputs) -> Tensor:
        """Room for the values of a pass, which grows with the largest one."""
        tokens = max(pass_inputs.num_tokens, pass_inputs.largest[0])
        outputs = max(pass_inputs.num_columns, pass_inputs.largest[1])
        row_bytes = tokens * self._binding.body_bytes + outputs * self._binding.head_bytes
        needed = pass_inputs.num_rows * row_bytes + 64
        if self._arena.numel() < needed:
            self._arena = torch.empty(needed, dtype=torch.uint8)
        return self._arena

    def logits(self, num_rows: int, num_columns: int) -> Tensor:
        """Room for logits (B, K, V)."""
        assert self.program.logits is not None
        return torch.empty(num_rows, num_columns, self.program.logits.cols)

    @property
    def struct(self) -> ProgramStruct:
        """The program as the library reads it."""
        return self._binding.struct

    def make(self, call: PassStruct) -> None:
        """Make such a pass."""
        self.library.outrider_runtime_run(
            ctypes.addressof(self.struct), ctypes.addressof(call), self.workers
        )


class Bound(NamedTuple):
    """A program that can be called, and the tables of its rotary parts."""

    executor: Executor
    rotary: Rotary


def bind(
    program: Program, module: Any, layers: Sequence[LayerShape], dtype: torch.dtype, path: Path
) -> Bound:
    """The program on the tensors of the module that it was lowered from."""
    tensors: dict[str, Tensor | Matrix] = {
        **tensors_of(program, module),
        **program.constants,
        **program.matrices,
    }
    return Bound(Executor(program, tensors, layers, dtype, path), rotary_of(module, program))


def tensors_of(program: Program, module: Any) -> dict[str, Tensor]:
    """The parameters and buffers of a module that a program reads, by name."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    read = _named(program) - program.constants.keys() - program.matrices.keys()
    return {name: tensor for name, tensor in named.items() if name in read}


class NativeRun(OnOwnThreads):
    """A model's passes on the executor. It keeps its own copy of the weights."""

    def __init__(self, lm: LM, module: Any, program: Program, path: Path) -> None:
        self.bound = bind(program, module, lm.shape.layers, lm.dtype, path)
        self.path = path

    @classmethod
    def around(cls, bound: Bound, path: Path) -> NativeRun:
        """A run of a program that is bound already."""
        run = cls.__new__(cls)
        run.bound = bound
        run.path = path
        return run

    @property
    def executor(self) -> Executor:
        return self.bound.executor

    @property
    def experts_read(self) -> float | None:
        """Distinct experts that the latest pass read, the mean of its layers; None: there are none."""
        return self.executor.experts_read

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
        """Logits (B, K, V), fp32, and the hidden states (B, T, H) of these layers, which change no
        other number."""
        if missing := [key for key in layers if key not in self.executor.program.signals]:
            raise CapabilityError(
                f"the native runtime does not give the hidden states of layers {missing}"
            )
        tables = self.bound.rotary.up_to(int(positions.numpy().max()))
        return self.executor.run(ids, positions, plan, columns, layers, tables)


def _named(program: Program) -> set[str]:
    """Tensors that a program reads."""
    ops = (*program.body, *program.head)
    return {name for op in ops for name in (op.weight, op.bias) if name} | {
        value.name for value in program.values if value.source == Source.CONSTANT
    }


def _matrix_bytes(program: Program, tensors: Mapping[str, Tensor | Matrix | PackedWeight]) -> int:
    """Bytes of the bf16 matrices that a program multiplies with."""
    multiplied = (Code.LINEAR, Code.EXPERTS, Code.HEADS)
    ops = (*program.body, *program.head)
    total = 0
    for name in {op.weight for op in ops if op.code in multiplied}:
        weight = tensors[name]
        if isinstance(weight, PackedWeight):
            total += weight.plain_bytes
        elif isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
            total += weight.nbytes
    return total


def _address(memory: Memory | None) -> int | None:
    if memory is None:
        return None
    return memory.data_ptr() if isinstance(memory, Tensor) else memory.ctypes.data


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of tensors, null for None."""
    return (ctypes.c_void_p * len(tensors))(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors)
    )


class KeptAddresses:
    """Addresses of the tensors of a list, kept as long as the same list with the same first tensor
    comes.

    Code that moves the tensors of a list moves all of them, or makes another list. Sixty tensors of
    thirty layers take 0.1 ms to ask where a pass has driven everything out of the processor's
    caches.
    """

    def __init__(self) -> None:
        self._last: tuple[Sequence[Tensor], Tensor, ctypes.Array[ctypes.c_void_p]] | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        last = self._last
        if not tensors:
            return addresses(tensors)
        if last is None or last[0] is not tensors or last[1] is not tensors[0]:
            self._last = last = tensors, tensors[0], addresses(tensors)
        return last[2]


def _paths(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depths (B, T), and paths (B, T, T): the tokens on the way to each token, itself last; what
    lies after is never read."""
    depths = (seen.sum(axis=2) - 1).astype(np.int32)
    # ancestors stand before their descendants
    paths = np.argsort(~seen, axis=2, kind="stable").astype(np.int32)
    return depths, paths


def use_native_run(lm: LM, module: Any, cache: Path, *, is_checked: bool = False) -> NativeRun:
    """Run the model's passes on the executor from now on. Raises CapabilityError, with `lm` as it
    was, where that cannot be.

    `is_checked`: an earlier start has compared its logits with the plain module's.
    """
    if lm.device.type != "cpu" or lm.dtype not in DTYPES:
        dtype = str(lm.dtype).removeprefix("torch.")
        raise NotLoweredError(
            f"the native runtime runs bfloat16 and float32 on a CPU, not {dtype} on "
            f"{lm.device.type}"
        )
    path = library.find(cache)
    before = lm.run
    layers = lm.shape.layers
    with one_thread(lm.shape.num_parameters):
        expected = None if is_checked else probe_logits(lm)
        program = lower(module)
    if program.matrices and lm.dtype != torch.bfloat16:
        raise NotLoweredError(
            "weights kept in integers are multiplied in bfloat16 alone, with activations rounded "
            "to 8 bits"
        )
    keep_windows(lm, program)
    try:
        run = lm.run = NativeRun(lm, module, program, path)
        if expected is not None:
            check_same_logits(
                lm,
                expected,
                module,
                picks_experts=any(op.code == Code.EXPERTS for op in program.body),
            )
    except CapabilityError:
        lm.run = before
        lm.lay_out(layers)
        raise
    lm.kernels = run.executor.library
    return run
