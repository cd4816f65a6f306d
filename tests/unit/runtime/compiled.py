"""Small C++ programs over the words and kernels of native/, for sets of instructions that can run here."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.instructions import INSTRUCTIONS, of_this_architecture, of_this_cpu
from outrider.runtime import building

HERE = Path(__file__).parent
# Debian: g++-aarch64-linux-gnu, qemu-user-static
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"


@functools.cache
def printed(name: str, kind: str, folder: Path) -> list[str]:
    """The lines that the program NAME.cpp prints with these instructions. Skips where they cannot
    run."""
    is_own = kind in of_this_architecture()
    compiler = building.compiler() if is_own else shutil.which(CROSS)
    emulator = () if is_own else (shutil.which(EMULATOR),)
    if compiler is None or None in emulator or (is_own and of_this_cpu() not in ("avx512", kind)):
        pytest.skip(f"cannot compile and run {kind} here")
    program = folder / f"{name}-{kind}"
    static = () if is_own else ("-static",)
    flags = [flag for flag in building.FLAGS if flag not in ("-shared", "-fPIC")]
    command = (
        compiler,
        *flags,
        *static,
        *INSTRUCTIONS[kind],
        f"-I{building.HERE / 'native'}",
        str(HERE / f"{name}.cpp"),
        *(building.LINKED[sys.platform] if is_own else ()),
        "-o",
        str(program),
    )
    compiling = subprocess.run(command, capture_output=True, text=True)
    assert compiling.returncode == 0, compiling.stderr
    running = subprocess.run((*emulator, str(program)), capture_output=True, text=True)
    assert running.returncode == 0, (running.returncode, running.stdout, running.stderr)
    return running.stdout.splitlines()
