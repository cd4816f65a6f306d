"""Weights in the form in which they are multiplied, kept in files that later starts map.

A file is the bytes of tensors one after the other; a table next to it says where each begins and
the sum of its bits. Where the system keeps files in huge pages, mapped weights are read as fast as
memory made for them, and processes share them. Elsewhere they are copied.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil
import torch
from torch import Tensor

from outrider.cache import keep_json, kept_json, make_folder, refuse_unsafe
from outrider.huge_pages import HUGE, LINE, on_huge_pages

log = logging.getLogger("outrider.models")

# of all files; those that were not read for longest go first
MAX_BYTES = 64 << 30
MAX_FILES = 200
MAX_SHARE = 4  # all files together take at most one of this many parts of the disk's room
SUFFIX = ".weights"
PROBE = 2 * HUGE  # bytes of a file that shows what the system does with files
MAPPED_SHARE = 0.9  # of a mapping must be in huge pages: below, copies are read faster
# file systems on which a mapped file can still be read after it was removed; on a network's, that
# ends the process
LOCAL = frozenset({"bcachefs", "btrfs", "ext4", "f2fs", "overlay", "xfs"})
DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))


class Place(NamedTuple):
    """The place of a tensor in a file of weights."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


class WeightsFile:
    """A file of weights that is being written, one tensor after the other.

    It is written in whole huge pages: one that is written in two parts would stay in small pages.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._page = memoryview(bytearray(HUGE))
        self._count = 0  # bytes in it
        self._size = 0
        self.places: dict[str, Place] = {}
        self.mapping: mmap.mmap | None = None  # of the whole file, once it is there

    def add(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], parts: Iterable[Tensor]
    ) -> None:
        """Write a tensor that is given from front to back. Raises OSError where the disk does not
        take it."""
        self.places[name] = Place(self._size, dtype, tuple(shape))
        for part in parts:
            self._write(_bytes(part).numpy().data)
        self._write(memoryview(bytes(-self._size % LINE)))

    def _write(self, data: memoryview) -> None:
        self._size += len(data)
        while data:
            if not self._count and len(data) >= HUGE:
                whole = len(data) // HUGE * HUGE
                self._put(data[:whole])
                data = data[whole:]
                continue
            count = min(HUGE - self._count, len(data))
            self._page[self._count : self._count + count] = data[:count]
            self._count += count
            data = data[count:]
            if self._count == HUGE:
                self._flush()

    def finish(self) -> None:
        """Write what is left, and map the file: this one, whatever another process puts into its
        place."""
        self._flush()
        if self._size:
            self.mapping = _map(self._file)

    def _flush(self) -> None:
        self._put(self._page[: self._count])
        self._count = 0

    def _put(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]


@contextmanager
def writing_weights(path: Path, size: int) -> Iterator[WeightsFile]:
    """A file to write tensors into, which is in place at the end, whole, or not at all.

    Raises OSError where it cannot be written, or `size`, the bytes of all that is to be kept of a
    model, is more than all files together may take.
    """
    make_folder(path.parent)
    room = _room(path.parent)
    if size > room:
        raise OSError(
            f"{size >> 20} MiB of weights are too many: on this disk {room >> 20} MiB are for them"
        )
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with open(handle, "wb", buffering=0) as raw:
            file = WeightsFile(raw)
            yield file
            file.finish()
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)


def keep_weights(path: Path, key: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, whole or not at all. Raises OSError where they cannot be written."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    with writing_weights(path, size) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor.dtype, tensor.shape, [tensor])
    keep_written(path, key, file)


def keep_written(path: Path, key: str, file: WeightsFile) -> dict[str, Tensor]:
    """The tensors of a file that was written; from now on `kept_weights` finds them under this key.
    Raises OSError where its table cannot be written."""
    places = file.places
    weights = _Weights.read(path.parent, file.mapping, places)
    table = {
        name: [place.offset, str(place.dtype).removeprefix("torch."), list(place.shape), total]
        for (name, place), total in zip(places.items(), weights.sums, strict=True)
    }
    keep_json(_table(path), {"key": key, "tensors": table}, max_files=2 * MAX_FILES)
    _remove_oldest(path.parent)
    return weights.fast()


def kept_weights(path: Path, key: str) -> dict[str, Tensor]:
    """The tensors that were kept in a file under this key; none where it is absent, another or
    damaged."""
    table = kept_json(_table(path), functools.partial(_read_table, key))
    if table is None:
        return {}
    try:
        refuse_unsafe(path)
        places = {name: place for name, (place, _) in table.items()}
        with path.open("rb") as file:
            weights = _Weights.read(path.parent, _map(file), places)
    except (OSError, ValueError):  # torch's words for a file that is too short
        return {}
    if weights.sums != [total for _, total in table.values()]:
        log.info("'%s' is damaged: its weights are made again", path)
        return {}
    with suppress(OSError):  # a cache that is only read
        os.utime(path)
        os.utime(_table(path))
    return weights.fast()


class _Weights(NamedTuple):
    """The tensors of a file, mapped and read once."""

    tensors: dict[str, Tensor]
    sums: list[int]
    huge_bytes: int
    folder: Path

    @classmethod
    def read(cls, folder: Path, mapping: mmap.mmap | None, places: Mapping[str, Place]) -> _Weights:
        """The tensors at these places. Raises ValueError where the file is too short."""
        before = _huge_bytes()
        tensors = {name: _at(mapping, place) for name, place in places.items()}
        sums = _sums(tensors.values())
        return cls(tensors, sums, _huge_bytes() - before, folder)

    def fast(self) -> dict[str, Tensor]:
        """The tensors as they are where nearly all lies in huge pages, else copies that do."""
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        is_huge = size >= PROBE and self.huge_bytes >= MAPPED_SHARE * size - 2 * HUGE
        if is_huge and is_local(self.folder):
            return self.tensors
        return {name: on_huge_pages(tensor) for name, tensor in self.tensors.items()}


@functools.cache
def is_mapped_huge(folder: Path) -> bool:
    """Whether the system keeps files of this folder in huge pages: tried with a small one."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not is_local(folder):
        return False
    try:
        make_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".new", buffering=0) as file:
            # not zeros: memory that was never touched would be written in small pages
            file.write(b"\1" * PROBE)
            before = _huge_bytes()
            tensor = _at(_map(file), Place(0, torch.uint8, (PROBE,)))  # mapped until it is counted
            _sum(tensor)
            return _huge_bytes() - before >= PROBE
    except OSError:
        return False


def is_local(folder: Path) -> bool:
    """Whether a folder lies on a disk of this machine, as far as its file system says."""
    place = folder.resolve()
    # of two mounts at one place the later one counts
    kinds = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    for parent in (place, *place.parents):
        if parent in kinds:
            return kinds[parent] in LOCAL
    return False


def unthrottled_bytes() -> int:
    """Bytes that can be written now without waiting for a disk: Linux lets a process run on up to
    the middle between the amount of unwritten data at which it begins to write and the one at which
    it stops processes."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
        pages = dict(line.split() for line in lines)
        limits = (pages[f"nr_dirty_{name}threshold"] for name in ("background_", ""))
        free = sum(map(int, limits)) // 2 - int(pages["nr_dirty"])
    except (OSError, KeyError, ValueError):
        return 0
    return max(0, free) * mmap.PAGESIZE


def _map(file: Any) -> mmap.mmap:
    """A whole file, as memory that may be changed without changing the file. Raises OSError, or
    ValueError where it is empty."""
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _at(mapping: mmap.mmap | None, place: Place) -> Tensor:
    if mapping is None or not place.size:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(mapping, dtype=torch.uint8, count=place.size, offset=place.offset)
    return flat.view(place.dtype).view(place.shape)


def _huge_bytes() -> int:
    """Bytes of files that this process has mapped in huge pages."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
            found = [line.split()[1] for line in lines if line.startswith("FilePmdMapped:")]
    except OSError:  # another system, or a container that hides it
        return 0
    return sum(map(int, found)) << 10


def _sums(tensors: Iterable[Tensor]) -> list[int]:
    """The sum of each, on all threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(_sum, tensors))
    finally:
        torch.set_num_threads(threads)


def _sum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, eight bytes at a time: any number of zeros, and any one change,
    make another one."""
    flat = _bytes(tensor)
    whole = len(flat) // 8 * 8
    return _wrapped(int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum()))


def _wrapped(total: int) -> int:
    """A number of any size as an int64, which wraps around."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _table(path: Path) -> Path:
    return path.with_suffix(".json")


def _read_table(key: str, content: Any) -> dict[str, tuple[Place, int]] | None:
    """Each tensor's place and sum, of a file's content, which anybody may have changed. Raises an
    error of any kind where it is none."""
    if content["key"] != key:
        return None
    table = {}
    for name, (offset, dtype, shape, total) in content["tensors"].items():
        place = Place(offset, getattr(torch, dtype), tuple(shape))
        numbers = (offset, *shape)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("a size that is none")
        if place.dtype not in DTYPES or type(total) is not int or offset % LINE:
            raise TypeError("a type, a sum or a place that is none")
        table[name] = (place, total)
    return table


def _room(folder: Path) -> int:
    """Bytes that all files of weights may take."""
    disk = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in _files(folder))
    return min(disk // MAX_SHARE, MAX_BYTES)


def _files(folder: Path) -> list[Path]:
    """The files of weights, the newest first."""
    return sorted(folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)


def _remove_oldest(folder: Path) -> None:
    left = _room(folder)
    for number, file in enumerate(_files(folder), start=1):
        left -= file.stat().st_size
        if left < 0 or number > MAX_FILES:
            file.unlink(missing_ok=True)
            _table(file).unlink(missing_ok=True)
