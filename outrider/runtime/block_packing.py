"""Puts tensors of a GGUF file into panels by the native library, straight from the mapped file to
where they stay.

The panels are those of `models/gguf/packing.by_torch` to the byte, which needs some ten passes over
memory: most of the time that a large model took to start.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import numpy as np
from torch import Tensor

from outrider.cache import cache_folder
from outrider.errors import CapabilityError, CheckpointError
from outrider.huge_pages import room_for_weight
from outrider.models.gguf.experts import SAME
from outrider.models.gguf.formats import panel_bytes
from outrider.models.gguf.packing import Stored, by_torch
from outrider.models.linear.panel import WIDTH
from outrider.runtime import library

log = logging.getLogger("outrider.models")


def pack(stored: Stored) -> Tensor:
    """A `Packer`: the library, looked for when there is something to pack; torch where there is
    none for this CPU."""
    native = _library()
    return by_torch(stored) if native is None else by_library(native, stored)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return library.load(library.find(cache_folder()))
    except (CapabilityError, OSError) as error:
        log.info("blocks are put into panels by torch, which is slower: %s", error)
        return None


def by_library(native: ctypes.CDLL, stored: Stored) -> Tensor:
    """The packed panels that `by_torch` makes."""
    tensors, order = stored
    if len({(tensor.kind, tensor.shape[-1], tensor.shape[:-2]) for tensor in tensors}) > 1:
        raise CheckpointError(
            f"'{tensors[0].name}' and what belongs to it are tensors of several kinds"
        )
    mapped = [tensor.read() for tensor in tensors]  # held until the panels are made
    rows = np.concatenate([_addresses(part) for part in mapped], axis=-1)
    rows = rows if order is SAME else rows[..., order]  # numpy refuses one that is not there
    kind = tensors[0].kind
    inputs = tensors[0].shape[-1]
    outputs = rows.shape[-1]
    panels = room_for_weight(
        [*rows.shape[:-1], -(-outputs // WIDTH), panel_bytes(kind, WIDTH, inputs)]
    )
    for source, target in zip(
        rows.reshape(-1, outputs), panels.view(-1, *panels.shape[-2:]), strict=True
    ):
        source = np.ascontiguousarray(source)
        packed = native.outrider_pack_blocks(
            source.ctypes.data, outputs, inputs, int(kind), target.data_ptr()
        )
        assert packed, f"{kind.name} has panels, and the library does not make them"
    return panels


def _addresses(mapped: np.ndarray) -> np.ndarray:
    """The address of each row of a contiguous array (..., rows, bytes of a row)."""
    count = np.arange(int(np.prod(mapped.shape[:-1])), dtype=np.uint64).reshape(mapped.shape[:-1])
    return count * np.uint64(mapped.shape[-1]) + np.uint64(mapped.ctypes.data)
