"""How fast this processor can multiply bf16 at all: the bound of a pass over many tokens, as bandwidth is that of a pass
over one. Measured between registers (`arithmetic.cpp`), so that no kernel's quality is in it."""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path

import torch

from outrider.models import native

SOURCE = Path(__file__).with_suffix(".cpp")
FLOPS_PER_TURN = 16 * 32 * 2  # chains x pairs x (multiply, add)
TURNS = 200_000  # a millisecond on a core of 200 GFLOP/s


class Arithmetic:
    """The probe, built into `folder`."""

    def __init__(self, folder: Path, threads: int) -> None:
        path = folder / "arithmetic.so"
        subprocess.run([native.compiler(), *native.FLAGS, str(SOURCE), "-o", str(path)], check=True)
        self._run = ctypes.CDLL(str(path)).dot_products
        self._run.argtypes, self._run.restype = (ctypes.c_int64, ctypes.c_int), ctypes.c_float
        self._threads = threads

    @staticmethod
    def is_possible() -> bool:
        """Whether the processor has bf16 dot products, and a compiler is here."""
        return native.is_supported(torch.device("cpu"), torch.bfloat16) and native.compiler() is not None

    def flops_per_s(self) -> float:
        start = time.perf_counter()
        self._run(TURNS, self._threads)
        return TURNS * FLOPS_PER_TURN * self._threads / (time.perf_counter() - start)
