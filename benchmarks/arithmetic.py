"""How fast this processor can multiply bf16 at all: the bound of a pass over many tokens, as
bandwidth is that of a pass over one. Measured between registers (`arithmetic.cpp`), so that no
kernel's quality is in it."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from outrider.instructions import INSTRUCTIONS, of_this_cpu
from outrider.runtime import building

SOURCE = Path(__file__).with_suffix(".cpp")


class Arithmetic:
    """The probe, built into `folder`."""

    def __init__(self, folder: Path, threads: int) -> None:
        path = folder / "arithmetic.so"
        tool = building.compiler()
        kind = of_this_cpu()
        assert tool is not None
        assert kind is not None
        flags = (*building.FLAGS, "-fopenmp", *INSTRUCTIONS[kind], f"-I{building.HERE / 'native'}")
        subprocess.run([tool, *flags, str(SOURCE), "-o", str(path)], check=True)
        self._measure = ctypes.CDLL(str(path)).flops_per_s
        self._measure.argtypes = (ctypes.c_int, ctypes.c_int)
        self._measure.restype = ctypes.c_double
        self._threads = threads

    @staticmethod
    def is_possible() -> bool:
        """Whether our kernels run here, and a compiler is here."""
        return of_this_cpu() is not None and building.compiler() is not None

    def flops_per_s(self, rows: int) -> float:
        """Of `rows` (1 to 16) rows: few of them leave a matrix tile partly empty."""
        return self._measure(self._threads, rows)
