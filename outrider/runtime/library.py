"""The executor's shared library: found in the package, or built once into the cache folder by a checkout never installed.

It links nothing but the C++ runtime: no torch, no OpenMP. One library for each set of instructions that `models/native/lanes.h`
is written for; the best one that the CPU has is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from outrider.errors import CapabilityError
from outrider.models import native

HERE = Path(__file__).parent
KERNELS = HERE.parent / "models" / "native"
SOURCES = (
    *(HERE / "native" / name for name in (
        "executor.cpp", "attend.h", "functions.h", "linear.h", "pool.h", "program.h", "tokenwise.h",
    )),
    *(KERNELS / name for name in ("panel.h", "panel_tiles.h", "panel_vectors.h", "lanes.h", "lanes_avx2.h", "lanes_avx512.h")),
)  # fmt: skip
FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic")
PREBUILT = HERE / "lib"  # where a wheel or an editable install has them


def fingerprint() -> str:
    """Changes with the sources and the flags."""
    facts = repr(([source.read_bytes() for source in SOURCES], FLAGS))
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def file_name(kind: str) -> str:
    """Of the library for one of `native.INSTRUCTIONS`. A library of other sources has another name."""
    return f"runtime-{kind}-{fingerprint()}.so"


def build(path: Path, kind: str) -> None:
    """Compile to `path`, some ten seconds. Raises CapabilityError with the compiler's first complaint."""
    tool = native.compiler()
    if tool is None:
        raise CapabilityError("no C++ compiler found (install g++)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        includes = (f"-I{HERE / 'native'}", f"-I{KERNELS}")
        command = (tool, *FLAGS, *native.INSTRUCTIONS[kind], *includes, str(HERE / "native" / "executor.cpp"), "-o", str(made))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise CapabilityError(f"{tool} could not build the native runtime ({first.strip()})")
        os.replace(made, path)  # atomic: a reader sees the whole file or none


def find(cache: Path) -> Path:
    """The best library for this CPU, built into `cache` where the package has none. Raises CapabilityError with the reason."""
    kind = native.instructions()
    if kind is None:
        raise CapabilityError("the CPU has neither AVX2 nor AVX-512 with bf16")
    name = file_name(kind)
    if (PREBUILT / name).exists():
        return PREBUILT / name
    if not (cache / name).exists():
        build(cache / name, kind)
    return cache / name


def why_missing() -> str | None:
    """None where the library is in the package, or can be built; else the reason in a few words."""
    kind = native.instructions()
    if kind is None:
        return "the CPU has neither AVX2 nor AVX-512 with bf16"
    if (PREBUILT / file_name(kind)).exists() or native.compiler() is not None:
        return None
    return "not in this installation, and no C++ compiler found (install g++)"


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library, its names to itself."""
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.outrider_runtime_workers.argtypes, library.outrider_runtime_workers.restype = (size,), pointer
    library.outrider_runtime_dismiss.argtypes, library.outrider_runtime_dismiss.restype = (pointer,), None
    library.outrider_runtime_run.argtypes, library.outrider_runtime_run.restype = (pointer, pointer, pointer), None
    library.outrider_runtime_has_tiles.argtypes, library.outrider_runtime_has_tiles.restype = (), ctypes.c_bool
    library.outrider_runtime_sizes.argtypes, library.outrider_runtime_sizes.restype = (), size
    return library


@functools.cache
def workers(library: ctypes.CDLL, num_threads: int) -> int:
    """Threads that run passes, shared by all models of the process; they sleep between passes, and are never dismissed."""
    return library.outrider_runtime_workers(num_threads)
