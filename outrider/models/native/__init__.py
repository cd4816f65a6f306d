"""Our C++ kernels for decoding on CPU: built with the system's compiler when compilation is asked for, then kept.

There is no library for it. For a handful of bf16 rows on 2 AVX-512 cores, oneDNN, MKL and inductor's own templates stream
14 to 23 GB/s of weights where memory gives 30 to 35, and their attention multiplies blocks of 512 keys through a BLAS made
for large matrices; on AVX2 they have no bf16 at all. Linear layers, by vectors or by matrix tiles (AMX), and attention, a
page each, take what memory gives (numbers in docs/architecture.md). The rest is what follows a pass: laws, coins, noise and
the verdict on a draft, together one call (`verdicts.cpp`, by way of `verifiers/kernels.py`). All are written once, in the
words of `lanes.h`, for both instruction sets.
Wherever they cannot be had (another CPU, another dtype, no compiler, `--runtime eager`), torch's own do the same work; `--compile
off` takes the linears and attention all the same on a CPU where torch has no fast bf16.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from outrider.cache import cache_folder
from outrider.errors import CapabilityError
from outrider.instructions import INSTRUCTIONS

_HERE = Path(__file__).parent
_MODEL = (
    "panel_linear.cpp", "panel_tiles.cpp", "block_linear.cpp", "attention.cpp", "panel.h",
    "panel_vectors.h", "panel_tiles.h", "rounded_inputs.h", "block_panels.h", "shim.h", "lanes.h", "lanes_avx512.h",
    "lanes_avx2.h",
)  # fmt: skip
_SAMPLING = (
    "verdicts.cpp", "laws.cpp", "noise.cpp", "chains.h", "trees.h", "residuals.h", "races.h", "laws.h", "gumbel.h", "philox.h",
)  # fmt: skip
SOURCES = tuple(_HERE / name for name in (*_MODEL, *_SAMPLING))
PANEL_KERNELS = ("outrider_panel_linear_vectors", "outrider_panel_linear_tiles")  # `outrider_panel_linear` takes the best
REMEDY = "Use --runtime eager, or --dtype float32."  # the second where a CPU without AVX-512 takes them uncompiled, too
FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp")


def compiler() -> str | None:
    """The C++ compiler to call, None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def instructions() -> str | None:
    """The best of INSTRUCTIONS that this CPU has; None: it has none of them."""
    if torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported():
        return "avx512"
    return "avx2" if torch.cpu._is_avx2_supported() else None


def flags(kind: str | None = None) -> tuple[str, ...]:
    """What the compiler is told, for the best of INSTRUCTIONS or those of `kind`. Raises CapabilityError: the CPU has none."""
    kind = kind or instructions()
    if kind is None:
        raise CapabilityError("the CPU has neither AVX2 nor AVX-512 with bf16, which the CPU kernels need. Use --runtime eager.")
    return (*FLAGS, *INSTRUCTIONS[kind])


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels serve this: bf16 on a CPU with AVX-512 and its dot products, or with AVX2."""
    return device.type == "cpu" and dtype == torch.bfloat16 and instructions() is not None


def can_serve(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether they are supported, and can be built."""
    return is_supported(device, dtype) and compiler() is not None


def fingerprint(*, of_programs: bool = False) -> str:
    """Changes with the sources, the flags and torch. `of_programs`: with the sources alone whose kernels programs call."""
    sources = [_HERE / name for name in _MODEL] if of_programs else SOURCES
    facts = repr(([source.read_bytes() for source in sources], FLAGS, instructions(), torch.__version__))
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def library_path() -> Path:
    """Where the kernels are, once built."""
    return cache_folder() / f"native-{fingerprint()}.so"


def build(path: Path, kind: str | None = None) -> None:
    """Compile to `path` (a few seconds), for the best of INSTRUCTIONS or those of `kind`. Raises CapabilityError with the
    compiler's first complaint, and where the CPU has none of them."""
    tool = compiler()
    if tool is None:
        raise CapabilityError("no C++ compiler found (install g++). Use --runtime eager.")
    home = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        links = (f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}")
        sources = (str(source) for source in SOURCES if source.suffix == ".cpp")
        command = (tool, *flags(kind), f"-I{home / 'include'}", *sources, "-o", str(made), *links)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise CapabilityError(f"{tool} could not build the CPU kernels ({first.strip()}). {REMEDY}")
        os.replace(made, path)  # atomic: a reader sees the whole file or none


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library, its names visible to programs loaded later."""
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.outrider_cache_attention.argtypes = (pointer, pointer, pointer, pointer, pointer, ctypes.c_double, pointer)
    library.outrider_cache_attention.restype = None
    for name in ("outrider_panel_linear", *PANEL_KERNELS):
        getattr(library, name).argtypes = (pointer, size, size, pointer, pointer, pointer, size)
        getattr(library, name).restype = None
    blocks, rows = library.outrider_block_linear, library.outrider_block_rows
    blocks.argtypes, blocks.restype = (pointer, size, size, pointer, size, size, pointer, pointer, size), None
    rows.argtypes, rows.restype = (pointer, size, size, pointer, size, size, pointer), None
    library.outrider_has_tiles.restype = ctypes.c_bool
    library.outrider_laws.argtypes, library.outrider_laws.restype = (pointer,) * 5, ctypes.c_bool
    library.outrider_verdicts.argtypes, library.outrider_verdicts.restype = (pointer, pointer), ctypes.c_bool
    number = ctypes.c_uint64
    library.outrider_noise.argtypes, library.outrider_noise.restype = (number, number, pointer, pointer, size, size), None
    return library
