"""How fast this processor can multiply bf16 at all: the bound of a pass over many tokens, as bandwidth is that of a pass
over one. Measured between registers (`arithmetic.cpp`), so that no kernel's quality is in it."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch

from outrider.models import native

SOURCE = Path(__file__).with_suffix(".cpp")


class Arithmetic:
    """The probe, built into `folder`."""

    def __init__(self, folder: Path, threads: int) -> None:
        path, kernels = folder / "arithmetic.so", Path(native.__file__).parent
        sources = (str(SOURCE), str(kernels / "panel_tiles.cpp"))
        subprocess.run([native.compiler(), *native.flags(), f"-I{kernels}", *sources, "-o", str(path)], check=True)
        self._measure = ctypes.CDLL(str(path)).flops_per_s
        self._measure.argtypes, self._measure.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_double
        self._threads = threads

    @staticmethod
    def is_possible() -> bool:
        """Whether our kernels run here, and a compiler is here."""
        return native.can_serve(torch.device("cpu"), torch.bfloat16)

    def flops_per_s(self, rows: int) -> float:
        """Of `rows` (1 to 16) rows: few of them leave a matrix tile partly empty."""
        return self._measure(self._threads, rows)
