"""The likeliest tokens after outputs of a pass, by the native library where there is one, else by
torch.

For drafters that remember or branch on them. torch's `topk` walks a vocabulary number by number and
copies it first: 60 us for 49,000 scores, here 6.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NONE = -1  # in place of a token where there are no more


class Likeliest(NamedTuple):
    """The k likeliest tokens of n outputs, likeliest first, and each one's share of its
    distribution."""

    tokens: np.ndarray  # (n, k) int64
    shares: np.ndarray  # (n, k) fp32


class TopTokens:
    """Looks for the largest of the scores of outputs. Of equal ones the library takes the lowest
    id."""

    def __init__(self, kernels: ctypes.CDLL | None = None) -> None:
        """`kernels`: the native library (`LM.kernels`), None: torch."""
        self._kernels = kernels

    def tokens(self, scores: Tensor, outputs: Sequence[int], count: int) -> np.ndarray:
        """The `count` likeliest tokens (n, k) after rows `outputs` of scores (..., V), read as (M,
        V)."""
        if not self._reads(scores):
            top_ids: np.ndarray = (
                torch.topk(scores.flatten(0, -2)[list(outputs)], count, dim=-1)
                .indices.cpu()
                .numpy()
            )
            return top_ids
        return self._found(scores, outputs, count, scores.shape[-1], None)[0]

    def shares(
        self,
        scores: Tensor,
        outputs: Sequence[int],
        count: int,
        width: int,
        temperatures: Sequence[float],
    ) -> Likeliest:
        """The likeliest tokens with their shares, in the softmax of the first `width` scores at a
        temperature of each output."""
        if self._reads(scores):
            return Likeliest(*self._found(scores, outputs, count, width, temperatures))
        chosen = scores.flatten(0, -2)[list(outputs), :width].float()
        heat = torch.tensor(temperatures, device=scores.device)[:, None]
        top = torch.softmax(chosen / heat, dim=-1).topk(count)
        return Likeliest(top.indices.cpu().numpy(), top.values.cpu().numpy())

    def _reads(self, scores: Tensor) -> bool:
        return (
            self._kernels is not None
            and scores.device.type == "cpu"
            and scores.dtype == torch.float32
            and scores.is_contiguous()
        )

    def _found(
        self,
        scores: Tensor,
        outputs: Sequence[int],
        count: int,
        width: int,
        temperatures: Sequence[float] | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self._kernels is not None
        wanted = array("q", outputs)
        shape = array("q", (len(outputs), scores.shape[-1], width, count))
        heat = None if temperatures is None else array("d", temperatures)
        ids = np.empty((len(outputs), count), dtype=np.int64)
        shares = np.empty((len(outputs), count), dtype=np.float32)
        at = [None if part is None else part.buffer_info()[0] for part in (shape, wanted, heat)]
        self._kernels.outrider_top_tokens(
            scores.data_ptr(), *at, ids.ctypes.data, shares.ctypes.data
        )
        return ids, shares
