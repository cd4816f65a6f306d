"""Puts tensors of a GGUF file into panels, by torch or by a faster packer
(`runtime/block_packing.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.huge_pages import on_huge_pages
from outrider.models.gguf.experts import SAME
from outrider.models.gguf.formats import panels_of
from outrider.models.gguf.header import TensorInfo

# tensors side by side, and which of their rows each output is
Stored: TypeAlias = tuple[Sequence[TensorInfo], np.ndarray]
Packer: TypeAlias = Callable[[Stored], Tensor]


def by_torch(stored: Stored) -> Tensor:
    """The panels of one matrix, or of one for each expert: the reference."""
    tensors, order = stored
    blocks = torch.from_numpy(np.concatenate([tensor.read() for tensor in tensors], axis=-2))
    blocks = blocks if order is SAME else blocks[..., torch.from_numpy(order), :]
    kind = tensors[0].kind
    return on_huge_pages(
        panels_of(blocks, kind)
        if blocks.dim() == 2
        else torch.stack([panels_of(block, kind) for block in blocks])
    )


def panels_in(stored: Sequence[Stored], pack: Packer = by_torch) -> Iterator[Tensor]:
    """Panels of tensors in blocks, whose rows follow one another in these orders; of experts for
    each of them.

    Made on all threads, each on its own tensors.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(pack, stored)
    finally:
        torch.set_num_threads(threads)
