"""Builds the executor's shared library. Needs neither torch nor anything else that is installed:
`hatch_build.py` calls it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.errors import CapabilityError
from outrider.instructions import INSTRUCTIONS, of_this_architecture

HERE = Path(__file__).parent
PREBUILT = HERE / "lib"  # a wheel or an editable install has libraries there
SOURCES = tuple(sorted((HERE / "native").glob("*.*")))
FLAGS = (
    "-O3",
    "-ffp-contract=off",  # products and sums are joined where the sources say so: by all compilers
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-pthread",
    "-Wno-unknown-pragmas",
)
LINKED = {  # by system; libraries by name, since a CXX that says gcc would leave them out
    "linux": ("-Wl,-Bsymbolic", "-lstdc++", "-lm"),
    "darwin": ("-lc++",),
}
SUFFIXES = {"linux": ".so", "darwin": ".dylib", "win32": ".dll"}


def compiler() -> str | None:
    """The C++ compiler to call, None where there is none, and on Windows: GCC puts AVX's registers
    on its stack where they may not lie."""
    if sys.platform not in LINKED:
        return None
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def why_no_compiler() -> str:
    """The reason, in a message, where `compiler` finds none."""
    if sys.platform not in LINKED:
        return "nothing is compiled on this system (install the wheel for it)"
    return "no C++ compiler found (install g++)"


def fingerprint() -> str:
    """Changes with the sources and the flags."""
    facts = repr(([source.read_bytes() for source in SOURCES], FLAGS, LINKED, INSTRUCTIONS))
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def file_name(kind: str, system: str = sys.platform) -> str:
    """Name of the library for one of INSTRUCTIONS; other sources give another name."""
    return f"runtime-{kind}-{fingerprint()}{SUFFIXES.get(system, '.so')}"


def build(path: Path, kind: str) -> None:
    """Compile to `path`, some ten seconds. Raises CapabilityError with the compiler's first
    complaint."""
    tool = compiler()
    if tool is None:
        raise CapabilityError(why_no_compiler())
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        library = Path(scratch) / path.name
        sources = (str(source) for source in SOURCES if source.suffix == ".cpp")
        command = (
            tool,
            *FLAGS,
            *INSTRUCTIONS[kind],
            f"-I{HERE / 'native'}",
            *sources,
            *LINKED[sys.platform],
            "-o",
            str(library),
        )
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            first = next(
                (line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200]
            )
            raise CapabilityError(f"{tool} could not build the native runtime ({first.strip()})")
        os.replace(library, path)  # atomic: a reader sees the whole file or none


def build_all(status: Callable[[str], None] = lambda line: None) -> None:
    """Make a library in PREBUILT for each set of instructions of this architecture, at the same time,
    and delete those of other sources.

    `status` is called if that takes long. Raises CapabilityError as `build` does.
    """
    kinds = of_this_architecture()
    paths = {kind: PREBUILT / file_name(kind) for kind in kinds}
    missing = [kind for kind, path in paths.items() if not path.exists()]
    if missing and compiler() is not None:
        status("compiling the native runtime, about a minute")
    with ThreadPoolExecutor() as pool:
        compiling = [pool.submit(build, paths[kind], kind) for kind in missing]
    for task in compiling:
        task.result()
    for old in set(PREBUILT.glob("runtime-*")) - set(paths.values()):
        old.unlink()
