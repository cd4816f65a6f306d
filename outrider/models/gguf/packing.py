"""Puts tensors of a GGUF file into panels: by the native library from the mapped file, by torch where there is none.

The library's panels are those of `formats.panels_of` to the byte. It writes them once, straight to where they stay; torch needs
some ten passes over memory, which takes most of a large model's start.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.cache import cache_folder
from outrider.huge_pages import on_huge_pages, room_for_weight
from outrider.models.gguf.experts import SAME
from outrider.models.gguf.formats import panel_bytes, panels_of
from outrider.models.gguf.header import TensorInfo
from outrider.runtime import library

Stored = tuple[Sequence[TensorInfo], np.ndarray]  # tensors one beside the other, and which of their rows each output is


def panels_in(stored: Sequence[Stored]) -> Iterator[Tensor]:
    """Panels of tensors in blocks, whose rows follow one another in these orders; of experts for each of them.

    Made on all threads, each on its own tensors.
    """
    native = None if library.why_missing() else library.load(library.find(cache_folder()))
    make = by_torch if native is None else partial(by_library, native)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(make, stored)
    finally:
        torch.set_num_threads(threads)


def by_torch(stored: Stored) -> Tensor:
    """The panels of one matrix, or of one for each expert: the reference."""
    tensors, order = stored
    blocks = torch.from_numpy(np.concatenate([tensor.read() for tensor in tensors], axis=-2))
    blocks = blocks if order is SAME else blocks[..., torch.from_numpy(order), :]
    kind = tensors[0].kind
    return on_huge_pages(panels_of(blocks, kind) if blocks.dim() == 2 else torch.stack([panels_of(own, kind) for own in blocks]))


def by_library(native: ctypes.CDLL, stored: Stored) -> Tensor:
    """What `by_torch` makes."""
    tensors, order = stored
    mapped = [tensor.read() for tensor in tensors]  # held until the panels are made
    rows = np.concatenate([_addresses(one) for one in mapped], axis=-1)
    rows = rows if order is SAME else rows[..., order]
    kind, inputs, outputs = tensors[0].kind, tensors[0].shape[-1], rows.shape[-1]
    panels = room_for_weight([*rows.shape[:-1], -(-outputs // 32), panel_bytes(kind, 32, inputs)])
    for own, made in zip(rows.reshape(-1, outputs), panels.view(-1, *panels.shape[-2:]), strict=True):
        own = np.ascontiguousarray(own)
        packed = native.outrider_pack_blocks(own.ctypes.data, outputs, inputs, int(kind), made.data_ptr())
        assert packed, f"{kind.name} has panels, and the library does not make them"
    return panels


def _addresses(mapped: np.ndarray) -> np.ndarray:
    """Where each row (..., rows, bytes of a row) of a contiguous array lies."""
    count = np.arange(int(np.prod(mapped.shape[:-1])), dtype=np.uint64).reshape(mapped.shape[:-1])
    return count * np.uint64(mapped.shape[-1]) + np.uint64(mapped.ctypes.data)
