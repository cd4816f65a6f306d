"""Panels of a GGUF file, mapped as far as earlier starts kept them.

Where the system keeps files in huge pages, a start that makes panels writes them to files of the
cache folder and maps these, too: as many as the disk takes without a wait, the next start more.
Elsewhere they are made into memory at every start, which is as fast as a copy of kept ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.cache import keeping
from outrider.models.gguf.packing import Stored, panels_in
from outrider.models.loading.kept_weights import (
    SUFFIX,
    Place,
    is_mapped_huge,
    keep_written,
    kept_weights,
    unhurried_bytes,
    writing_weights,
)
from outrider.runtime.block_packing import pack, panels_shape, parts

LEAST = 64 << 20  # bytes of panels that are worth a file: fewer are made in an instant
MAX_WRITERS = 8  # the system lets one thread at a time write to a file, so each has its own
MAX_PARTS = 32  # files of one model


class KeptPanels(NamedTuple):
    """The files of the panels of one model: `stem` and a number each, all under the model's key."""

    stem: Path
    key: str

    def of(self, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
        """The panels of each."""
        panels: dict[str, Tensor] = {}
        if is_mapped_huge(self.stem.parent):
            number = self._take_kept(panels, 0)
            left = {name: each for name, each in stored.items() if name not in panels}
            with keeping("panels of a GGUF file"):
                panels |= self._keep(_fitting(left), number)
        left = {name: each for name, each in stored.items() if name not in panels}
        panels |= dict(zip(left, panels_in(list(left.values()), pack), strict=True))
        return panels

    def _take_kept(self, panels: dict[str, Tensor], number: int) -> int:
        """Map the files from this number on; the first number that there is no file of."""
        while number < MAX_PARTS and (kept := kept_weights(self._file(number), self.key)):
            panels |= kept
            number += 1
        return number

    def _keep(self, stored: Sequence[tuple[str, Stored]], number: int) -> dict[str, Tensor]:
        """Panels in further files, from this number on. Raises OSError where they cannot be
        written."""
        total = sum(_num_bytes(each) for _, each in stored)
        writers = min(torch.get_num_threads(), MAX_WRITERS, MAX_PARTS - number, total // LEAST)
        if writers < 1:
            return {}
        shares: list[list[tuple[str, Stored]]] = [[] for _ in range(writers)]
        sizes = [0] * writers
        for name, each in stored:
            least = sizes.index(min(sizes))
            shares[least].append((name, each))
            sizes[least] += _num_bytes(each)
        with ThreadPoolExecutor(writers) as pool:
            files = list(pool.map(self._write, range(number, number + writers), shares, sizes))
        panels: dict[str, Tensor] = {}
        for path, places in files:
            panels |= keep_written(path, self.key, places)
        return panels

    def _write(
        self, number: int, stored: Sequence[tuple[str, Stored]], size: int
    ) -> tuple[Path, dict[str, Place]]:
        path = self._file(number)
        with writing_weights(path, size) as file:
            for name, each in stored:
                file.add(name, torch.uint8, panels_shape(each), parts(each))
        return path, file.places

    def _file(self, number: int) -> Path:
        return self.stem.with_name(f"{self.stem.name}-{number}{SUFFIX}")


def _fitting(stored: Mapping[str, Stored]) -> list[tuple[str, Stored]]:
    """As many as can be written without a wait."""
    room = unhurried_bytes()
    fitting = []
    for name, each in stored.items():
        size = _num_bytes(each)
        if size <= room:
            room -= size
            fitting.append((name, each))
    return fitting


def _num_bytes(stored: Stored) -> int:
    return torch.Size(panels_shape(stored)).numel()
