"""Panels of a model's weights, mapped as far as earlier starts kept them.

Where the system keeps files in huge pages, a start that makes panels writes them to files of the
cache folder and maps these, too: as many as the disk takes without a wait, the next start more.
Elsewhere they are made into memory at every start, which is as fast as a copy of kept ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.cache import keeping
from outrider.models.gguf.packing import Stored, panels_in
from outrider.models.loading.kept_weights import (
    SUFFIX,
    WeightsFile,
    is_mapped_huge,
    keep_written,
    kept_weights,
    unthrottled_bytes,
    writing_weights,
)
from outrider.runtime.block_packing import pack, panels_shape, parts
from outrider.switches import switched

SWITCH = "OUTRIDER_KEEP_PANELS"  # in the environment
_, NEVER = CHOICES = ("auto", "never")
LEAST = 64 << 20  # bytes of panels that are worth a file: fewer are made in an instant
MAX_WRITERS = 8  # the system lets one thread at a time write to a file, so each has its own


def are_kept() -> bool:
    """Whether panels may be kept. Raises ConfigError where the environment says neither."""
    return switched(SWITCH, CHOICES) != NEVER


class Item(NamedTuple):
    """Panels that can be made."""

    size: int  # bytes, at most
    make: Callable[[], tuple[torch.dtype, Sequence[int], Iterable[Tensor]]]  # type, shape, parts


class KeptPanels:
    """The files of the panels of one model: `stem` and a number each, all under the model's key."""

    def __init__(self, stem: Path, key: str) -> None:
        self._stem = stem
        self._key = key
        self._are_kept = are_kept()
        self._number = 0  # of the next file
        self._size = 0  # bytes in those before

    def kept(self) -> dict[str, Tensor]:
        """All panels that earlier starts kept."""
        panels: dict[str, Tensor] = {}
        self._number = self._size = 0
        while self._are_kept and (more := kept_weights(self._file(self._number), self._key)):
            panels |= more
            self._number += 1
            self._size += sum(tensor.nbytes for tensor in more.values())
        return panels

    def keep(self, items: Mapping[str, Item]) -> dict[str, Tensor]:
        """Panels in further files: of as many items as can be written without a wait."""
        if not self._are_kept or sum(item.size for item in items.values()) < LEAST:
            return {}
        if is_mapped_huge(self._stem.parent):
            with keeping("panels of weights"):
                return self._keep(_fitting(items))
        return {}

    def _keep(self, items: Sequence[tuple[str, Item]]) -> dict[str, Tensor]:
        """Write them side by side. Raises OSError where that cannot be done, or a model's own files
        would push one another out."""
        total = sum(item.size for _, item in items)
        writers = min(torch.get_num_threads(), MAX_WRITERS, total // LEAST)
        if writers < 1:
            return {}
        shares: list[list[tuple[str, Item]]] = [[] for _ in range(writers)]
        sizes = [0] * writers
        for name, item in items:
            least = sizes.index(min(sizes))
            shares[least].append((name, item))
            sizes[least] += item.size
        with ThreadPoolExecutor(writers) as pool:
            numbers = range(self._number, self._number + writers)
            files = list(pool.map(partial(self._write, self._size + total), numbers, shares))
        panels: dict[str, Tensor] = {}
        for path, file in files:
            panels |= keep_written(path, self._key, file)
        return panels

    def _write(
        self, size: int, number: int, items: Sequence[tuple[str, Item]]
    ) -> tuple[Path, WeightsFile]:
        path = self._file(number)
        with writing_weights(path, size) as file:
            for name, item in items:
                file.add(name, *item.make())
        return path, file

    def _file(self, number: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}-{number}{SUFFIX}")


def block_panels(kept: KeptPanels, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The panels of tensors of a GGUF file: kept ones, as many others as can be kept, the rest in
    memory."""
    panels = {name: tensor for name, tensor in kept.kept().items() if name in stored}
    items = {name: _item(each) for name, each in stored.items() if name not in panels}
    panels |= kept.keep(items)
    left = {name: each for name, each in stored.items() if name not in panels}
    panels |= dict(zip(left, panels_in(list(left.values()), pack), strict=True))
    return panels


def _item(stored: Stored) -> Item:
    shape = panels_shape(stored)
    return Item(torch.Size(shape).numel(), lambda: (torch.uint8, shape, parts(stored)))


def _fitting(items: Mapping[str, Item]) -> list[tuple[str, Item]]:
    """The items that can be written without a wait, in their order."""
    room = unthrottled_bytes()
    fitting = []
    for name, item in items.items():
        if item.size <= room:
            room -= item.size
            fitting.append((name, item))
    return fitting
