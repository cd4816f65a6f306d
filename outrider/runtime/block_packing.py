"""Puts tensors of a GGUF file into panels by the native library, straight from the mapped file to
where they stay.

The panels are those of `models/gguf/packing.by_torch` to the byte, which needs some ten passes over
memory: most of the time that a large model took to start.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.cache import cache_folder
from outrider.errors import CapabilityError, CheckpointError
from outrider.huge_pages import room_for_weight
from outrider.models.gguf.experts import SAME
from outrider.models.gguf.formats import panel_bytes
from outrider.models.gguf.packing import Stored, by_torch
from outrider.models.linear.panel import WIDTH
from outrider.runtime import library

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

PART = 4 << 20  # bytes of panels made at once on their way to a file

log = logging.getLogger("outrider.models")


def pack(stored: Stored) -> Tensor:
    """A `Packer`: the library, looked for when there is something to pack; torch where there is
    none for this CPU."""
    native = _library()
    return by_torch(stored) if native is None else by_library(native, stored)


def parts(stored: Stored) -> Iterator[Tensor]:
    """The bytes of `pack`, from front to back, each part in memory that the next one uses again."""
    native = _library()
    assert native is not None, "panels are kept by starts on the native runtime"
    return parts_by_library(native, stored)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return library.load(library.find(cache_folder()))
    except (CapabilityError, OSError) as error:
        log.info("blocks are put into panels by torch, which is slower: %s", error)
        return None


def by_library(native: ctypes.CDLL, stored: Stored) -> Tensor:
    """The packed panels that `by_torch` makes."""
    rows = _Rows.of(stored)
    panels = room_for_weight(rows.panels_shape)
    for addresses, target in zip(rows.addresses, panels.view(-1, *panels.shape[-2:]), strict=True):
        rows.pack(native, addresses, target)
    return panels


def parts_by_library(native: ctypes.CDLL, stored: Stored) -> Iterator[Tensor]:
    """The bytes of `by_library`, from front to back, each part in memory that the next one uses
    again."""
    rows = _Rows.of(stored)
    _, size = rows.panels_shape[-2:]
    at_once = max(1, PART // size)  # panels
    room = torch.empty(at_once, size, dtype=torch.uint8)
    for addresses in rows.addresses:
        for start in range(0, len(addresses), at_once * WIDTH):
            some = addresses[start : start + at_once * WIDTH]
            part = room[: -(-len(some) // WIDTH)].zero_()
            rows.pack(native, some, part)
            yield part


def panels_shape(stored: Stored) -> list[int]:
    """([experts,] panels, bytes of one)."""
    tensors, order = stored
    outputs = len(order) or sum(tensor.shape[-2] for tensor in tensors)
    *experts, _, inputs = tensors[0].shape
    return [*experts, -(-outputs // WIDTH), panel_bytes(tensors[0].kind, WIDTH, inputs)]


class _Rows(NamedTuple):
    """The rows of matrices of one shape in a mapped file."""

    addresses: np.ndarray  # (matrices, outputs)
    kind: GGMLQuantizationType
    inputs: int
    panels_shape: list[int]
    mapped: list[np.ndarray]  # held until the panels are made

    @classmethod
    def of(cls, stored: Stored) -> _Rows:
        tensors, order = stored
        if len({(tensor.kind, tensor.shape[-1], tensor.shape[:-2]) for tensor in tensors}) > 1:
            raise CheckpointError(
                f"'{tensors[0].name}' and what belongs to it are tensors of several kinds"
            )
        mapped = [tensor.read() for tensor in tensors]
        rows = np.concatenate([_addresses(part) for part in mapped], axis=-1)
        rows = rows if order is SAME else rows[..., order]  # numpy refuses one that is not there
        addresses = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))
        return cls(addresses, tensors[0].kind, tensors[0].shape[-1], panels_shape(stored), mapped)

    def pack(self, native: ctypes.CDLL, addresses: np.ndarray, target: Tensor) -> None:
        """Put rows that follow one another into panels of zeros."""
        packed = native.outrider_pack_blocks(
            addresses.ctypes.data, len(addresses), self.inputs, int(self.kind), target.data_ptr()
        )
        assert packed, f"{self.kind.name} has panels, and the library does not make them"


def _addresses(mapped: np.ndarray) -> np.ndarray:
    """The address of each row of a contiguous array (..., rows, bytes of a row)."""
    count = np.arange(int(np.prod(mapped.shape[:-1])), dtype=np.uint64).reshape(mapped.shape[:-1])
    return count * np.uint64(mapped.shape[-1]) + np.uint64(mapped.ctypes.data)
