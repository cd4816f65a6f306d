"""The executor's shared library: found in the package, or built once into the cache folder by a
checkout never installed.

It links nothing but the C++ runtime: no torch, no OpenMP. One library for each set of instructions
that `native/lanes.h` is written for; the best one that the CPU has is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from pathlib import Path

from outrider.cache import cache_folder, make_folder, why_unsafe
from outrider.errors import CapabilityError
from outrider.instructions import of_this_cpu
from outrider.lazy import filelock
from outrider.runtime.building import PREBUILT, build, compiler, file_name, why_no_compiler
from outrider.wellformed import regular_bytes

log = logging.getLogger("outrider.runtime")
NO_INSTRUCTIONS = (
    "the native library is for CPUs with AVX2 or AVX-512 with bf16 on Linux and Windows, with "
    "ARM's NEON with byte products on Linux and macOS"
)


def find(cache: Path) -> Path:
    """The best library for this CPU, built into `cache` where the package has none, and again where
    it is damaged there. Raises CapabilityError with the reason."""
    kind = of_this_cpu()
    if kind is None:
        raise CapabilityError(NO_INSTRUCTIONS)
    name = file_name(kind)
    if (PREBUILT / name).exists():
        return PREBUILT / name
    path = cache / name
    if (why := why_unsafe(path)) is not None:
        raise CapabilityError(f"no library is loaded from the cache, since {why}")
    if not _is_whole(path):
        if compiler() is None:
            raise CapabilityError(_no_library())
        log.warning(
            "compiling the native runtime, once for this machine: some ten seconds, minutes "
            "on a busy one"
        )
        try:
            make_folder(cache)
            with filelock.FileLock(cache / f"{name}.lock"):
                # a process that started at the same time may have built it meanwhile
                if not _is_whole(path):
                    build(path, kind)
                    _sum_of(path).write_text(_sum(path), encoding="utf-8")
        except OSError as error:
            raise CapabilityError(
                f"the native runtime cannot be built in '{cache}': {error.strerror or error}"
            ) from error
    return path


def _is_whole(path: Path) -> bool:
    """Whether a library is in the cache as it was built."""
    try:
        return regular_bytes(_sum_of(path)).decode() == _sum(path)
    except (OSError, ValueError):
        return False


def _sum_of(path: Path) -> Path:
    """The file that holds a library's sum."""
    return path.with_suffix(".sum")


def _sum(path: Path) -> str:
    return hashlib.blake2b(regular_bytes(path), digest_size=16).hexdigest()


def why_missing() -> str | None:
    """None where the library is in the package and can be loaded, or can be built; else the reason
    in a few words."""
    kind = of_this_cpu()
    if kind is None:
        return NO_INSTRUCTIONS
    if (PREBUILT / file_name(kind)).exists():
        return why_unloadable(PREBUILT / file_name(kind))
    if (why := why_unsafe(cache_folder() / file_name(kind))) is not None:
        return f"{_not_installed()}, and {why}"
    return None if compiler() is not None else _no_library()


def _no_library() -> str:
    """Why there is neither a library nor a way to make one."""
    return f"{_not_installed()}, and {why_no_compiler()}"


def _not_installed() -> str:
    """That the package has no library for this system, and which it has instead."""
    others = ", ".join(sorted(path.name for path in PREBUILT.glob("runtime-*")))
    return "not in this installation" + (
        f", which has those of another processor, system or version ({others})" if others else ""
    )


def why_unloadable(path: Path) -> str | None:
    """The system's reason not to load a library: it is for another processor or a newer system, or
    damaged. None where it loads."""
    try:
        load(path)
    except CapabilityError as error:
        return str(error)
    return None


def in_use() -> tuple[Path, str]:
    """The library that passes run on, and the compiler that made it. Raises CapabilityError with
    the reason where there is none."""
    path = find(cache_folder())
    return path, load(path).outrider_runtime_compiler().decode()


def has_tiles() -> bool:
    """Whether the library, which is in the package or the cache, multiplies by matrix tiles (AMX)
    on this CPU."""
    return bool(load(find(cache_folder())).outrider_runtime_has_tiles())


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library, its names to itself. It has the verdict kernels of `verifiers/kernels.py`, too,
    on one thread.

    Raises CapabilityError where it cannot be loaded.
    """
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        _declare(library)
    # damaged, for another system, or in a file system that nothing is run from; another's library
    except (OSError, AttributeError) as error:
        raise CapabilityError(
            f"the native library cannot be loaded: {error}. Install outrider again, or from its "
            "sources with a C++ compiler, which makes one for this system"
        ) from error
    return library


def _declare(library: ctypes.CDLL) -> None:
    """The types of its functions. Raises AttributeError where one is missing."""
    pointer = ctypes.c_void_p
    size = ctypes.c_int64
    number = ctypes.c_uint64
    library.outrider_runtime_workers.argtypes = (size,)
    library.outrider_runtime_workers.restype = pointer
    library.outrider_runtime_dismiss.argtypes = (pointer,)
    library.outrider_runtime_dismiss.restype = None
    library.outrider_runtime_run.argtypes = (pointer, pointer, pointer)
    library.outrider_runtime_run.restype = None
    library.outrider_runtime_draft.argtypes = (pointer,) * 4
    library.outrider_runtime_draft.restype = ctypes.c_bool
    library.outrider_runtime_grow.argtypes = (pointer,) * 4
    library.outrider_runtime_grow.restype = ctypes.c_bool
    library.outrider_runtime_levels.argtypes = (pointer, pointer)
    library.outrider_runtime_levels.restype = ctypes.c_bool
    library.outrider_runtime_linear.argtypes = (pointer, pointer, size, pointer, pointer)
    library.outrider_runtime_linear.restype = None
    library.outrider_runtime_rows.argtypes = (pointer, pointer, size, pointer)
    library.outrider_runtime_rows.restype = None
    library.outrider_code_tables.argtypes = (pointer, size, size, pointer, pointer)
    library.outrider_code_tables.restype = None
    library.outrider_code_panels.argtypes = (pointer, size, size, pointer, pointer, pointer)
    library.outrider_code_panels.restype = None
    library.outrider_runtime_has_tiles.argtypes = ()
    library.outrider_runtime_has_tiles.restype = ctypes.c_bool
    library.outrider_runtime_compiler.argtypes = ()
    library.outrider_runtime_compiler.restype = ctypes.c_char_p
    library.outrider_runtime_sizes.argtypes = ()
    library.outrider_runtime_sizes.restype = size
    library.outrider_pack_blocks.argtypes = (pointer, size, size, size, pointer)
    library.outrider_pack_blocks.restype = ctypes.c_bool
    library.outrider_laws.argtypes = (pointer,) * 5
    library.outrider_laws.restype = ctypes.c_bool
    library.outrider_verdicts.argtypes = (pointer, pointer)
    library.outrider_verdicts.restype = ctypes.c_bool
    library.outrider_top_tokens.argtypes = (pointer,) * 6
    library.outrider_top_tokens.restype = None
    library.outrider_noise.argtypes = (number, number, pointer, pointer, size, size)
    library.outrider_noise.restype = None


@functools.cache
def workers(library: ctypes.CDLL, num_threads: int) -> int:
    """Threads that run passes, shared by all models of the process; they sleep between passes, and
    are never dismissed."""
    return library.outrider_runtime_workers(num_threads)
