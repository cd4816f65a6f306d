"""The words that all kernels are written in give the same bits on AVX2, AVX-512 and ARM's NEON."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.instructions import INSTRUCTIONS, of_this_architecture, of_this_cpu
from outrider.runtime import building

SOURCE = Path(__file__).with_name("lanes.cpp")
# Debian: g++-aarch64-linux-gnu, qemu-user-static
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
# AVX-512 rounds sums in its own way, tiny bf16 to 0
OTHERWISE = ("add_products bf16", "store_some bf16", "load_some bf16")


@functools.cache
def printed(kind: str, folder: Path) -> list[str]:
    """What each word gives with these instructions: a line of bits each. Skips where they cannot
    run."""
    is_own = kind in of_this_architecture()
    compiler = building.compiler() if is_own else shutil.which(CROSS)
    emulator = () if is_own else (shutil.which(EMULATOR),)
    if compiler is None or None in emulator or (is_own and of_this_cpu() not in ("avx512", kind)):
        pytest.skip(f"cannot compile and run {kind} here")
    program = folder / kind
    static = () if is_own else ("-static",)
    flags = [flag for flag in building.FLAGS if flag not in ("-shared", "-fPIC")]
    command = (
        compiler,
        *flags,
        *static,
        *INSTRUCTIONS[kind],
        f"-I{building.HERE / 'native'}",
        str(SOURCE),
        "-o",
        str(program),
    )
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run(
        (*emulator, str(program)), check=True, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lanes")


@pytest.mark.slow
def test_neon_gives_the_bits_of_avx2(folder: Path) -> None:
    assert len(printed("avx2", folder)) > 20_000
    assert printed("neon", folder) == printed("avx2", folder)


@pytest.mark.slow
def test_avx512_gives_the_bits_of_avx2(folder: Path) -> None:
    ours, others = (
        [line for line in printed(kind, folder) if not line.startswith(OTHERWISE)]
        for kind in ("avx2", "avx512")
    )
    assert others == ours
