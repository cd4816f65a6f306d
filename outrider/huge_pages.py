"""Weights and caches on huge pages: looking up addresses of 4 KiB pages halves the speed at which a
virtual machine reads memory.

Linux gives 2 MiB pages to memory that asks for them (transparent huge pages, `madvise` mode is the
usual default). Weights of the native runtime, and keys and values, are put side by side into blocks
made for them. It is advice: where the kernel cannot follow, nothing changes but speed.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

# bytes: of a page, of what is asked for at once, and between tensors
HUGE = 2 << 20
CHUNK = 64 << 20
LINE = 64


class HugePageSpace:
    """Memory on huge pages, given out from front to back; it lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: mmap.mmap | None = None
        self._next = self._end = 0

    def take(self, size: int) -> Tensor:
        """This many bytes of their own, all 0."""
        with self._lock:
            if self._block is None or self._next + size > self._end:
                self._open(max(size, CHUNK))
            assert self._block is not None
            tensor = torch.frombuffer(self._block, dtype=torch.uint8, count=size, offset=self._next)
            self._next += -(-size // LINE) * LINE
            return tensor

    def _open(self, size: int) -> None:
        self._block = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._block.madvise(mmap.MADV_HUGEPAGE)
        self._next = -torch.frombuffer(self._block, dtype=torch.uint8).data_ptr() % HUGE
        self._end = self._next + size


_WEIGHTS = HugePageSpace()


def zeros_on_huge_pages(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of zeros, side by side on huge pages; a few bytes, or on a system without such pages,
    as torch makes them."""
    sizes = [prod(shape) * dtype.itemsize for shape in shapes]
    if not hasattr(mmap, "MADV_HUGEPAGE") or sum(sizes) < 2 * HUGE:
        return [torch.zeros(*shape, dtype=dtype) for shape in shapes]
    space = HugePageSpace()
    return [
        space.take(size).view(dtype).view(*shape) if size else torch.zeros(*shape, dtype=dtype)
        for shape, size in zip(shapes, sizes, strict=True)
    ]


def room_for_weight(shape: Sequence[int]) -> Tensor:
    """Bytes of 0 next to other weights on huge pages; as torch makes them on a system without such
    pages."""
    room = _room(prod(shape))
    return torch.zeros(*shape, dtype=torch.uint8) if room is None else room.view(*shape)


def on_huge_pages(tensor: Tensor) -> Tensor:
    """A copy of a weight on huge pages; the weight itself where it is not on a CPU or the system
    has no such pages."""
    room = _room(tensor.nbytes) if tensor.device.type == "cpu" else None
    return tensor if room is None else room.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _room(size: int) -> Tensor | None:
    """This many bytes next to other weights; None for no bytes, or where there are no such pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not size:
        return None
    try:
        return _WEIGHTS.take(size)
    except (OSError, ValueError):  # a kernel without them, or no memory for a block
        return None
