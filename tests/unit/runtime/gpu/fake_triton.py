"""Triton as far as our kernels use it, run by torch on the CPU, one program after the other.

What it shows without a GPU: that kernels compute what they should; that no program reads what it
wrote without a barrier in between, nor what another program of the same launch writes. What it
cannot show: that Triton compiles them, their bits on a device, and any speed (`test_on_device.py`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

OURS = "outrider.runtime.gpu."
NEEDS_TRITON = ("kernels", "state_kernels", "work", "products", "recurrent", "steps")


@dataclass
class Memory:
    """One storage during a launch: which program wrote each number, and whether a barrier has
    passed since."""

    numbers: Tensor
    owner: Tensor
    is_fresh: Tensor


class Launch:
    """The programs of one kernel call."""

    current: Launch

    def __init__(self) -> None:
        self.program = (0, 0, 0)
        self.number = 0
        self.memories: dict[tuple[int, torch.dtype], Memory] = {}

    def memory(self, tensor: Tensor) -> Memory:
        key = tensor.untyped_storage().data_ptr(), tensor.dtype
        if key not in self.memories:
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            numbers = torch.as_strided(tensor, (count,), (1,), 0)
            self.memories[key] = Memory(
                numbers, torch.full((count,), -1), torch.zeros(count, dtype=torch.bool)
            )
        return self.memories[key]


@dataclass(frozen=True)
class Pointer:
    memory: Memory
    at: Any  # int or int64 tensor

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.memory, self.at + steps)

    @property
    def dtype(self) -> Any:
        return type("PointerType", (), {"element_ty": self.memory.numbers.dtype})


class Kernel:
    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Called from another kernel."""
        return self._function(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
            assert num_warps & (num_warps - 1) == 0, num_warps
            Launch.current = own = Launch()
            given = [
                Pointer(own.memory(one), one.storage_offset()) if isinstance(one, Tensor) else one
                for one in args
            ]
            for own.number, own.program in enumerate(product(*(range(size) for size in grid))):
                for memory in own.memories.values():
                    memory.is_fresh.zero_()
                self._function(*given, **named)

        return launch


def jit(function: Callable[..., None] | None = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    at = torch.as_tensor(pointer.at)
    if mask is not None:
        at, mask = torch.broadcast_tensors(at, mask)
        at = torch.where(mask, at, 0)
    number = Launch.current.number
    memory = pointer.memory
    read = at if mask is None else at[mask]
    owner = memory.owner[read]
    assert ((owner == -1) | (owner == number)).all(), (
        "a program reads what another one of the same launch wrote"
    )
    assert not (memory.is_fresh[read] & (owner == number)).any(), (
        "a program reads what it wrote without a barrier"
    )
    found = memory.numbers[at]
    return (
        found if mask is None else torch.where(mask, found, torch.tensor(other, dtype=found.dtype))
    )


def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    memory = pointer.memory
    at, value = torch.broadcast_tensors(torch.as_tensor(pointer.at), value)
    if mask is not None:
        at, value, mask = torch.broadcast_tensors(at, value, mask)
        at = at[mask]
        value = value[mask]
    assert ((memory.owner[at] == -1) | (memory.owner[at] == Launch.current.number)).all(), (
        "two programs write to one address"
    )
    memory.numbers[at] = value.to(memory.numbers.dtype)
    memory.owner[at] = Launch.current.number
    memory.is_fresh[at] = True


def debug_barrier() -> None:
    for memory in Launch.current.memories.values():
        memory.is_fresh.zero_()


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def _arange(begin: int, end: int) -> Tensor:
    assert (end - begin) & (end - begin - 1) == 0, f"a range of {end - begin}"
    return torch.arange(begin, end)


def _dot(a: Tensor, b: Tensor, total: Tensor | None = None, input_precision: str = "") -> Tensor:
    assert min(*a.shape, *b.shape) >= 16, (
        f"tensor cores take no {tuple(a.shape)} x {tuple(b.shape)}"
    )
    found = a.float() @ b.float()
    return found if total is None else total + found


LANGUAGE: dict[str, Any] = {
    "arange": _arange, "static_range": range,
    "program_id": lambda axis: torch.tensor(Launch.current.program[axis]), "load": load, "store": store,
    "debug_barrier": debug_barrier, "where": lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b)),
    "minimum": _pair(torch.minimum), "maximum": _pair(torch.maximum), "exp": torch.exp, "sqrt": torch.sqrt, "log": torch.log,
    "erf": torch.erf, "abs": torch.abs, "sum": lambda x, axis: x.sum(axis), "max": lambda x, axis: x.amax(axis),
    "min": lambda x, axis: x.amin(axis), "dot": _dot, "trans": lambda x: x.t(), "broadcast_to": torch.broadcast_to,
    "full": lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype), "constexpr": object,
    "float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "int32": torch.int32,
}  # fmt: skip


@contextmanager
def fake_triton() -> Iterator[None]:
    """Our modules that need Triton are imported with this one, and forgotten afterwards. Others
    never see it."""
    language = ModuleType("triton.language")
    triton = ModuleType("triton")
    language.__dict__.update(LANGUAGE)
    triton.__dict__.update(
        language=language,
        jit=jit,
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )
    fakes = {"triton": triton, "triton.language": language}
    ours = [OURS + name for name in NEEDS_TRITON]
    real = {name: sys.modules.pop(name) for name in fakes if name in sys.modules}
    before = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    sys.modules.update(fakes)
    try:
        for name in ours:
            importlib.import_module(name)
    finally:
        for name in fakes:
            del sys.modules[name]
        sys.modules.update(real)
    try:
        yield
    finally:
        for name in ours:
            del sys.modules[name]
        sys.modules.update(before)
