"""Compiling the native library on a machine of which nothing is known."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.instructions import of_this_architecture, of_this_cpu
from outrider.runtime import building

SOURCE = """
#include <cmath>
struct Base { virtual ~Base() = default; virtual double value(double x) { return x; } };
struct Derived : Base { double value(double x) override { return std::cbrt(x); } };
extern "C" double root(double x) { Base* made = new Derived; double value = made->value(x); delete made; return value; }
"""


def test_a_compiler_that_is_called_by_its_name_for_c_is_told_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft leaves CXX=gcc in the environment where it could not build an extension of its own: such
    a library had no symbols of C++ and could not be loaded. In a process of its own, since torch's
    libraries may bring them along."""
    kind = of_this_cpu()
    if kind is None or shutil.which("gcc") is None:
        pytest.skip("needs gcc, and a CPU with a native library")
    monkeypatch.setenv("CXX", "gcc")
    (tmp_path / "small.cpp").write_text(SOURCE)
    monkeypatch.setattr(building, "SOURCES", (tmp_path / "small.cpp",))
    building.build(tmp_path / "small.so", kind)
    code = f"import ctypes; print(ctypes.CDLL({str(tmp_path / 'small.so')!r}).root)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(tmp_path / "small.so"))
    library.root.argtypes = (ctypes.c_double,)
    library.root.restype = ctypes.c_double
    assert library.root(27.0) == pytest.approx(3.0)


def test_compilers_join_no_product_with_a_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC joins what stands in two statements, others what stands in one: a wheel's library would
    have other bits than one that is compiled at home."""
    kind = of_this_cpu()
    if kind is None or building.compiler() is None:
        pytest.skip("needs a compiler, and a CPU with a native library")
    (tmp_path / "joined.cpp").write_text(
        'extern "C" float joined(float x, float y, float z) { float p = x * y; return p + z; }'
    )
    monkeypatch.setattr(building, "SOURCES", (tmp_path / "joined.cpp",))
    building.build(tmp_path / "joined.so", kind)
    joined = ctypes.CDLL(str(tmp_path / "joined.so")).joined
    joined.argtypes = (ctypes.c_float,) * 3
    joined.restype = ctypes.c_float
    number = 1 + 2**-12  # its square is 1 + 2^-11 + 2^-24, of which fp32 keeps the first two
    assert joined(number, number, -1 - 2**-11) == 0


def test_all_libraries_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is announced where there is one; libraries of other sources go."""
    built: list[str] = []

    def write(path: Path, kind: str) -> None:
        built.append(kind)
        path.write_text(kind)

    monkeypatch.setattr(building, "build", write)
    monkeypatch.setattr(building, "compiler", lambda: "g++")
    monkeypatch.setattr(building, "PREBUILT", tmp_path)
    (tmp_path / "runtime-avx2-0.so").write_text("of other sources")
    lines: list[str] = []
    for _ in range(2):
        building.build_all(lines.append)
    assert sorted(built) == sorted(of_this_architecture())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        building.file_name(kind) for kind in of_this_architecture()
    )
    assert len(lines) == 1
    assert "compiling" in lines[0]
