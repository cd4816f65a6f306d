"""Tensors that loading made, in a file of the cache folder for the next start: panels of rounded or repacked weights.

A file is read whole or not at all: the start that keeps it knows the sum of each tensor's bits. It is made anew where a sum is
another one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.cache import make_folder, refuse_unsafe
from outrider.huge_pages import on_huge_pages

MAX_BYTES, MAX_FILES = 64 << 30, 50  # of all files; those that were not read for longest go first
MAX_SHARE = 4  # a file takes at most one of so many parts of the room that the disk has left
SUFFIX = ".safetensors"


def keep_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write them, whole or not at all, and give the sum of each. Raises OSError where they cannot be written."""
    make_folder(path.parent)
    size, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(path.parent).free
    if size > min(free // MAX_SHARE, MAX_BYTES):
        raise OSError(f"{size >> 20} MiB of weights are too many for a disk with {free >> 20} MiB free")
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".new")
    os.close(handle)
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, scratch)
        os.replace(scratch, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        Path(scratch).unlink(missing_ok=True)
    _remove_oldest(path.parent)
    return {name: _sum(tensor) for name, tensor in tensors.items()}


def kept_tensors(path: Path, sums: Mapping[str, int]) -> dict[str, Tensor] | None:
    """What `keep_tensors` wrote, on huge pages; None where the file is not there, or is another or a damaged one."""
    if not sums:
        return {}
    found = {}
    try:
        refuse_unsafe(path)
        with safe_open(path, "pt") as file:
            names = frozenset(file.keys())
            for name, expected in sums.items():
                if name not in names:
                    return None
                found[name] = on_huge_pages(file.get_tensor(name))
                if _sum(found[name]) != expected:
                    return None
        os.utime(path)
    except (OSError, SafetensorError):
        return None
    return found


def _sum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, eight bytes at a time: any number of zeros, and any one change, make another one."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())


def _remove_oldest(folder: Path) -> None:
    left = MAX_BYTES
    newest = sorted(folder.glob(f"*{SUFFIX}"), key=lambda one: one.stat().st_mtime, reverse=True)
    for number, file in enumerate(newest, start=1):
        left -= file.stat().st_size
        if left < 0 or number > MAX_FILES:
            file.unlink(missing_ok=True)
