"""Weights in two thirds of their size: a bf16 safetensors file as `weights.zip`, unpacked bit for
bit on first use.

The bytes at even and at odd offsets are two entries of the archive. Odd ones hold sign and exponent
of each weight and shrink to 40 %; even ones look random and are stored as they are. A checkout
carries the archive alone, a wheel the file alone. The target's and the block head's lie so; once they
were trained anew:

    python -c "import pathlib, outrider.demo.packed as packed;
    packed.pack(pathlib.Path('outrider/demo/models/target'))"
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import zipfile
import zlib
from functools import cache
from pathlib import Path
from threading import get_ident

from outrider.errors import CheckpointError

PACKED = "weights.zip"
WEIGHTS = "model.safetensors"
# entries of the archive
EVEN = "even"
ODD = "odd"


def pack(folder: Path) -> Path:
    """Write the folder's `weights.zip` from its `model.safetensors`; the same bytes give the same
    archive."""
    data = (folder / WEIGHTS).read_bytes()
    packed = folder / PACKED
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo(EVEN), data[0::2], zipfile.ZIP_STORED)
        archive.writestr(zipfile.ZipInfo(ODD), data[1::2], zipfile.ZIP_DEFLATED, compresslevel=9)
    return packed


def with_weights(folder: Path) -> Path:
    """This folder, its weights unpacked; where it cannot be written, a temporary one like it,
    removed when the program ends.

    A folder without an archive is returned as it is. Raises CheckpointError for a damaged archive,
    and where neither can be written.
    """
    if not (folder / PACKED).exists():
        return folder  # from a wheel
    try:
        _unpack(folder / PACKED, folder / WEIGHTS)
    except OSError:
        return _copy_with_weights(folder)
    return folder


@cache
def _copy_with_weights(folder: Path) -> Path:
    try:
        copy = Path(tempfile.mkdtemp(prefix="outrider-demo-"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        for file in folder.iterdir():
            if file.name not in (PACKED, WEIGHTS):
                shutil.copyfile(file, copy / file.name)
        _unpack(folder / PACKED, copy / WEIGHTS)
    except OSError as error:
        raise CheckpointError(
            f"'{folder / PACKED}' cannot be unpacked: neither '{folder}' nor a temporary folder "
            f"takes 28 MB ({error}). "
            "Make room, or let TMPDIR name a folder that can be written."
        ) from error
    return copy


def _unpack(packed: Path, weights: Path) -> None:
    """Make the file unless it is there, in a tenth of a second. It gets the archive's time, so that
    a new archive, or a change to the file, is seen. Processes or threads that unpack at once do not
    disturb one another. Raises OSError, CheckpointError."""
    status = packed.stat()
    if weights.is_file() and weights.stat().st_mtime_ns == status.st_mtime_ns:
        return
    scratch = weights.with_name(f"{weights.name}.{os.getpid()}.{get_ident()}")
    with scratch.open("wb") as file:  # where this fails, nothing is left to remove
        try:
            file.write(_unpacked(packed))
            file.flush()
            os.utime(scratch, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.replace(scratch, weights)  # atomic: a reader sees the whole file or none
        except BaseException:
            scratch.unlink()
            raise


def _unpacked(packed: Path) -> bytearray:
    """All bytes of the original; zipfile checks both entries' CRC-32. Raises CheckpointError where
    one does not fit."""
    try:
        with zipfile.ZipFile(packed) as archive:
            even = archive.read(EVEN)
            odd = archive.read(ODD)
        data = bytearray(len(even) + len(odd))
        data[0::2], data[1::2] = even, odd
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"'{packed}' is damaged ({error}). Check it out again: git checkout -- '{packed}'"
        ) from error
    return data
