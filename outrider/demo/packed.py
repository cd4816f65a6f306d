"""Weights in two thirds of their size: a bf16 safetensors file as `weights.zip`, unpacked bit for bit where it lies.

The bytes at even and at odd offsets are two entries of the archive. Odd ones hold sign and exponent of each weight and shrink to
40 %; even ones look random and are stored as they are. A checkout carries the archive alone, a wheel the file alone.

Once the pair was trained anew:

    python -c "import pathlib, outrider.demo.packed as packed; packed.pack(pathlib.Path('outrider/demo/models/target'))"
"""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

from outrider.errors import CheckpointError

PACKED, WEIGHTS = "weights.zip", "model.safetensors"
EVEN, ODD = "even", "odd"  # entries of the archive


def pack(folder: Path) -> Path:
    """Write the folder's `weights.zip` from its `model.safetensors`; the same bytes give the same archive."""
    data, packed = (folder / WEIGHTS).read_bytes(), folder / PACKED
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo(EVEN), data[0::2], zipfile.ZIP_STORED)
        archive.writestr(zipfile.ZipInfo(ODD), data[1::2], zipfile.ZIP_DEFLATED, compresslevel=9)
    return packed


def unpack(folder: Path) -> Path:
    """The folder's `model.safetensors`, made from its `weights.zip` where that is new; a tenth of a second for 28 MB.

    The file gets the archive's time, so another archive, or a file that was changed, is seen. Processes that unpack at once do
    not disturb one another. Raises CheckpointError for a damaged archive and for a folder that cannot be written.
    """
    weights, packed = folder / WEIGHTS, folder / PACKED
    if not packed.exists():
        return weights  # from a wheel
    made = packed.stat()
    if weights.exists() and weights.stat().st_mtime_ns == made.st_mtime_ns:
        return weights
    scratch = folder / f"{WEIGHTS}.{os.getpid()}"
    try:
        scratch.write_bytes(_unpacked(packed))
        os.utime(scratch, ns=(made.st_atime_ns, made.st_mtime_ns))
        os.replace(scratch, weights)  # atomic: a reader sees the whole file or none
    except OSError as error:
        raise CheckpointError(
            f"'{packed}' cannot be unpacked beside itself ({error.strerror or error}). Run 'outrider doctor' once as somebody who may "
            "write there, or install a wheel, which holds the weights unpacked."
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
    return weights


def _unpacked(packed: Path) -> bytearray:
    """All bytes of the original; zipfile checks both entries' CRC-32. Raises CheckpointError where one does not fit."""
    try:
        with zipfile.ZipFile(packed) as archive:
            even, odd = archive.read(EVEN), archive.read(ODD)
        data = bytearray(len(even) + len(odd))
        data[0::2], data[1::2] = even, odd
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError) as error:
        raise CheckpointError(f"'{packed}' is damaged ({error}). Check it out again: git checkout -- '{packed}'") from error
    return data
