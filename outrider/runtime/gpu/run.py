"""A lowered program on a CUDA device as a `Run` (`models/lm.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.lazy import Package
from outrider.models.lm import LM, PassLimits
from outrider.models.pass_plan import PassPlan
from outrider.models.probes.probe import check_same_logits, probe_logits
from outrider.models.stateful.lm import StateLM
from outrider.runtime.blocks import DTYPES, NotLoweredError
from outrider.runtime.limits import find_native_limits
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code, Program, Source
from outrider.runtime.own_states import moved_states
from outrider.runtime.rotary import positions_for, real_tables
from outrider.runtime.windows import keep_windows

# imported with the first run: it needs Triton
in_kernels: Any = Package("outrider.runtime.gpu.steps")
CHUNK = 1 << 16  # positions whose cosines and sines are made at once
# of a pass, beyond which experts are multiplied by the model's own code, all tokens of an expert
# together
EXPERT_TOKENS = 64


class DeviceRun:
    """A model's passes as few kernels. It reads the module's own weights, some of which it joins."""

    def __init__(self, lm: LM, module: Any, program: Program) -> None:
        self._program = program
        self._plain = lm.run
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        constants = {name: constant.to(lm.device) for name, constant in program.constants.items()}
        self._steps = in_kernels.Steps(program, {**named, **constants}, lm.shape.layers)
        self._rotary = rotary_tables(module, program, lm.shape.context_length, lm.device)
        self._has_experts = _has_experts(program)

    @property
    def max_exact_tokens(self) -> int:
        """Tokens of a pass up to which a token's bits do not depend on the others."""
        return EXPERT_TOKENS if self._has_experts else in_kernels.NARROW

    def find_limits(self, lm: LM, max_tokens: int) -> PassLimits:
        """Limits of passes that decode at most this many tokens. The cache is empty, before and
        after."""
        limits = find_native_limits(lm, min(max_tokens, self.max_exact_tokens))
        return replace(limits, exact_rows=limits.exact_rows and max_tokens <= self.max_exact_tokens)

    def sees_chains(self, num_tokens: int) -> bool:
        """Whether a pass of chains with this many tokens needs no mask: `PassPlan.chain_keys` says
        enough."""
        return not self._by_module(num_tokens)

    def _by_module(self, num_tokens: int) -> bool:
        return self._has_experts and not self._program.states and num_tokens > EXPERT_TOKENS

    def __call__(self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
        """Logits (B, K, V)."""
        return self.with_hidden(ids, positions, plan, columns, ())[0]

    def with_hidden(
        self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (B, K, V), and the hidden states (B, T, H) of these layers."""
        if self._by_module(ids.numel()):
            if layers:
                return self._plain.with_hidden(ids, positions, plan, columns, tuple(layers))
            return self._plain(ids, positions, plan, columns), []
        wanted = [self._program.signals.index(layer) for layer in layers]
        num_rows, num_tokens = ids.shape
        work = in_kernels.Work(
            ids.reshape(-1).contiguous(),
            positions.expand(ids.shape).reshape(-1).contiguous(),
            plan,
            columns,
            self._rotary,
            num_rows,
            num_tokens,
            hidden=dict.fromkeys(wanted, ids),
        )
        logits = self._steps.run(work)
        hidden = [work.hidden[index].view(*ids.shape, -1) for index in wanted]
        return logits.reshape(ids.shape[0], len(columns), -1), hidden


def use_device_run(lm: LM, module: Any) -> DeviceRun:
    """Run the model's passes as a lowered program from now on.

    Raises CapabilityError, with `lm` as it was, where that cannot be.
    """
    _refuse_dtype(lm)
    before = lm.run
    layers = lm.shape.layers
    expected = probe_logits(lm)
    program = lower(module)
    _refuse_program(program)
    if not _has_experts(program):  # wide passes through experts run by torch
        keep_windows(lm, program)
    try:
        lm.run = run = DeviceRun(lm, module, program)
        check_same_logits(lm, expected, module, picks_experts=_has_experts(program))
    except Exception as error:
        lm.run = before
        lm.lay_out(layers)
        if isinstance(error, CapabilityError):
            raise
        raise _not_here(error) from error
    return run


def device_states(lm: StateLM, module: Any) -> LM:
    """The model of `lm` as a lowered program, with its states in our cache. Raises CapabilityError
    where that cannot be; `lm` still runs then."""
    _refuse_dtype(lm)

    def run(lm: LM, program: Program) -> DeviceRun:
        _refuse_program(program)
        return DeviceRun(lm, module, program)

    try:
        return moved_states(lm, module, run)
    except (CapabilityError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _not_here(error) from error


def _refuse_dtype(lm: LM) -> None:
    if lm.dtype not in DTYPES:
        raise NotLoweredError(
            f"{str(lm.dtype).removeprefix('torch.')} is not lowered, bfloat16 and float32 are"
        )
    if find_spec("triton") is None:
        raise NotLoweredError("Triton is not installed")


def _refuse_program(program: Program) -> None:
    if program.matrices:
        raise NotLoweredError("weights kept in integers")
    if any(op.code == Code.CHOICE for op in program.body):
        raise NotLoweredError("an indexer's choice of positions")
    if any(value.source == Source.INPUT for value in program.values):
        raise NotLoweredError("a program with further inputs")


def _not_here(error: Exception) -> CapabilityError:
    return CapabilityError(
        f"its kernels do not run here: {(str(error).splitlines() or [type(error).__name__])[0]}"
    )


def _has_experts(program: Program) -> bool:
    return any(op.code == Code.EXPERTS for op in program.body)


def rotary_tables(
    module: Any, program: Program, context_length: int, device: torch.device
) -> list[Tensor]:
    """Cosines and sines of a whole context (positions, size), made once by a program's rotary
    modules: recordings hold their addresses."""
    dtypes = {value.name: value.dtype for value in program.values if value.source == Source.ROTARY}
    tables: list[Tensor] = []
    for index, (path, further, which) in enumerate(program.rotary):
        part = module.get_submodule(path)
        like = torch.empty(1, dtype=dtypes[str(index)], device=device)
        chunks = []
        for start in range(0, context_length, CHUNK):
            positions = torch.arange(start, min(start + CHUNK, context_length), device=device)[None]
            out = part(like, positions_for(part, positions), *further)
            chunks.append(real_tables(out)[which][0])
        tables.append(torch.cat(chunks).contiguous())
    return tables
