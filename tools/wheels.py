"""Builds the wheels for Linux, macOS and Windows and the source package on one Linux machine, into
dist/, and checks them.

    python -m tools.wheels [--only TAG]        `make wheels` is this, in an environment with the build tools

Zig's C++ compiler makes the native runtime for other systems, `hatch_build.py` a wheel around it.
g++ makes the one for Linux on x86-64: zig's has the same bits, but its AVX2 takes up to a third longer
for a pass (2026-11-30, both in one process in turn). So that one needs the glibc that auditwheel finds.
What is compiled is kept in build/wheels, by what went into it; the first time takes up to half an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from outrider.errors import CapabilityError
from outrider.instructions import INSTRUCTIONS, of_this_architecture
from outrider.runtime import building

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
INSIDE = "outrider/runtime/lib/"
UNPACKED = ("target", "heads/block")  # of the demo, which a checkout carries packed
ZIG = (sys.executable, "-m", "ziglang")
COMPILED = (*(flag for flag in building.FLAGS if flag != "-shared"), "-g0")
LINKED = ("-O3", "-shared", "-s")  # -O3: zig compiles its C++ library now, in the same mode
ENTRIES = (
    "outrider_runtime_run",
    "outrider_runtime_compiler",
    "outrider_verdicts",
    "outrider_noise",
)
X86 = {kind: INSTRUCTIONS[kind] for kind in ("avx512", "avx2")}


class WheelError(Exception):
    """A library or a wheel that is not what its tag says."""


@dataclass(frozen=True)
class Target:
    """A system that a wheel is for, and what zig calls it; nothing where g++ compiles."""

    system: str  # as Python calls it
    triple: str
    instructions: dict[str, tuple[str, ...]]  # flags of each of INSTRUCTIONS
    linked: tuple[str, ...]
    machine: str  # what lief calls the processor
    needs: tuple[str, ...]  # beginnings of the libraries that it may load, lower case


TARGETS = {
    "manylinux_2_31_x86_64": Target("linux", "", X86, (), "X86_64", ("lib", "ld-linux")),
    "manylinux_2_17_aarch64": Target(
        "linux",
        "aarch64-linux-gnu.2.17",
        {"neon": ("-mcpu=generic+v8_2a+dotprod+fullfp16",)},
        ("-Wl,-Bsymbolic",),
        "AARCH64",
        ("lib", "ld-linux"),
    ),
    "macosx_11_0_arm64": Target(
        "darwin",
        "aarch64-macos.11.0",
        {"neon": ("-mcpu=apple_m1",)},
        (),
        "ARM64",
        ("/usr/lib/libsystem.",),
    ),
    "win_amd64": Target(
        "win32", "x86_64-windows-gnu", X86, (), "AMD64", ("kernel32", "ntdll", "api-ms-win-crt-")
    ),
}


def build_libraries(tag: str, say: Callable[[str], None] = print) -> Path:
    """The folder with a tag's libraries, compiled anew where something in them changed."""
    target = TARGETS[tag]
    folder = BUILD / tag
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sources = [source for source in building.SOURCES if source.suffix == ".cpp"]
    for kind in target.instructions:
        started = time.monotonic()
        library = folder / building.file_name(kind, target.system)
        if not target.triple:
            _compile_here(library, kind)
            say(f"{tag}: {library.name}, {time.monotonic() - started:.0f} s")
            continue
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source, kind=kind: _object(tag, kind, source), sources))
        named = (f"-Wl,-install_name,@rpath/{library.name}",) if target.system == "darwin" else ()
        _zig(target, *LINKED, *target.linked, *named, *map(str, objects), "-o", str(library))
        for leftover in [path for path in folder.iterdir() if path.suffix != library.suffix]:
            leftover.unlink()  # import library and symbols of Windows
        say(f"{tag}: {library.name}, {time.monotonic() - started:.0f} s")
    return folder


def _compile_here(library: Path, kind: str) -> None:
    """By this machine's compiler. Raises WheelError where it is another machine, or cannot."""
    if kind not in of_this_architecture():
        raise WheelError(f"{library.name} is compiled on Linux on x86-64")
    try:
        building.build(library, kind)
    except CapabilityError as error:
        raise WheelError(str(error)) from error


def _object(tag: str, kind: str, source: Path) -> Path:
    """One source file, compiled; kept under the sum of all that it is made from."""
    target = TARGETS[tag]
    flags = [*COMPILED, *target.instructions[kind]]
    if target.system == "win32":
        flags.remove("-fPIC")
    read = [path for path in building.SOURCES if path.suffix == ".h" or path == source]
    facts = repr((target.triple, flags, [path.read_bytes() for path in read], _zig_version()))
    name = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
    path = BUILD / "objects" / f"{name}.o"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished.o")
        _zig(
            target,
            *flags,
            f"-I{building.HERE / 'native'}",
            "-c",
            str(source),
            "-o",
            str(unfinished),
        )
        os.replace(unfinished, path)
    return path


@cache
def _zig_version() -> str:
    return subprocess.run([*ZIG, "version"], check=True, capture_output=True, text=True).stdout


def _zig(target: Target, *arguments: str) -> None:
    """Raises WheelError with what the compiler said."""
    places = {f"ZIG_{which}_CACHE_DIR": str(BUILD / "zig") for which in ("GLOBAL", "LOCAL")}
    command = [*ZIG, "c++", "-target", target.triple, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | places)
    if done.returncode:
        raise WheelError(f"zig could not build for {target.triple}:\n{done.stderr[-2000:]}")


def build_wheel(folder: Path, dist: Path = DIST) -> Path:
    """A wheel with the libraries of a folder, whose name is its tag."""
    (wheel,) = _package("wheel", dist, {"OUTRIDER_WHEEL_LIBRARIES": str(folder)})
    return wheel


def build_source(dist: Path = DIST) -> Path:
    """The source package, which compiles the native runtime when it is installed."""
    (source,) = _package("sdist", dist, {})
    return source


def _package(what: str, dist: Path, settings: dict[str, str]) -> list[Path]:
    """The packages that hatchling writes, in a folder of their own until they are whole."""
    fresh = dist / f"unfinished-{what}"
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", what, "-d", str(fresh)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
    )
    if done.returncode:
        raise WheelError(f"hatchling could not make the {what}:\n{done.stderr[-2000:]}")
    made = [path.replace(dist / path.name) for path in sorted(fresh.iterdir())]
    fresh.rmdir()
    return made


def libraries_of(wheel: Path) -> list[str]:
    """The names of the native libraries in a wheel."""
    with ZipFile(wheel) as archive:
        return sorted(
            name.removeprefix(INSIDE) for name in archive.namelist() if name.startswith(INSIDE)
        )


def check_contents(wheel: Path, tag: str) -> None:
    """Raises WheelError where a wheel lacks one of its tag's libraries, the sources they were made
    from or the demo's weights, or has a library of another system."""
    target = TARGETS[tag]
    expected = sorted(building.file_name(kind, target.system) for kind in target.instructions)
    if (found := libraries_of(wheel)) != expected:
        raise WheelError(f"{wheel.name} has {found} instead of {expected}")
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    weights = [f"outrider/demo/models/{model}/model.safetensors" for model in UNPACKED]
    needed = {*weights} | {f"outrider/runtime/native/{source.name}" for source in building.SOURCES}
    if missing := sorted(needed - names):
        raise WheelError(f"{wheel.name} lacks {missing[0]}")


def check_library(path: Path, tag: str) -> str:
    """One line about a library: its format, processor and what it loads. Raises WheelError where
    that is not its tag's, or a function is missing."""
    import lief

    lief.logging.disable()
    target = TARGETS[tag]
    library: Any = lief.parse(str(path))
    if isinstance(library, lief.MachO.FatBinary):
        library = library.at(0)
    if library is None:
        raise WheelError(f"{path.name} is no library")
    header = library.header
    machine = getattr(header, "machine_type", None) or getattr(header, "machine", None)
    machine = (machine or header.cpu_type).name
    needs = [
        str(getattr(one, "name", one))  # Mach-O's are commands, one of which is the library's own
        for one in library.libraries
        if getattr(one, "command", 0) != lief.MachO.LoadCommand.TYPE.ID_DYLIB
    ]
    functions = {function.name.removeprefix("_") for function in library.exported_functions}
    if machine != target.machine:
        raise WheelError(f"{path.name} is for {machine}, not for {target.machine}")
    if others := [name for name in needs if not name.lower().startswith(target.needs)]:
        raise WheelError(f"{path.name} loads {others[0]}, which a system may lack")
    if bytes(ROOT) in path.read_bytes():
        raise WheelError(f"{path.name} has a path of this machine in it")
    if missing := [name for name in ENTRIES if name not in functions]:
        raise WheelError(f"{path.name} does not export {missing[0]}")
    facts = [f"{library.format.name} {machine}", f"loads {', '.join(needs)}"]
    if isinstance(library, lief.MachO.Binary):
        facts += [_macos(library, path)]
    return f"{path.name}: {'; '.join(facts)}"


def _macos(library: Any, path: Path) -> str:
    """The oldest macOS that loads a library. Raises WheelError for one that is newer than the tag,
    or not signed: Apple's processors run nothing unsigned."""
    oldest = library.build_version.minos
    if tuple(oldest[:2]) > (11, 0):
        raise WheelError(f"{path.name} needs macOS {oldest[0]}.{oldest[1]}, not 11.0")
    if not library.has_code_signature:
        raise WheelError(f"{path.name} is not signed")
    return f"macOS {oldest[0]}.{oldest[1]}, signed ad hoc"


def show_platform(wheel: Path, tag: str) -> None:
    """Raises WheelError where auditwheel finds a Linux wheel to need a newer system than its tag."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if f'platform tag: "{tag}"' not in " ".join(done.stdout.split()):
        raise WheelError(f"auditwheel on {wheel.name}:\n{done.stdout}{done.stderr}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, and say what was made."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("--only", choices=[*TARGETS, "sdist"], help="this one alone")
    only = parser.parse_args(arguments).only
    made = []
    try:
        for tag in TARGETS if only is None else {only} - {"sdist"}:
            folder = build_libraries(tag)
            for library in sorted(folder.iterdir()):
                print(check_library(library, tag))
            wheel = build_wheel(folder)
            check_contents(wheel, tag)
            if TARGETS[tag].system == "linux":
                show_platform(wheel, tag)
            made.append(wheel)
        if only in (None, "sdist"):
            made.append(build_source())
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    checked = [sys.executable, "-m", "twine", "check", "--strict", *map(str, made)]
    if subprocess.run(checked).returncode:
        return 1
    for path in made:
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
