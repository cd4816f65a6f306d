"""Weights rounded to codes of 4 or 8 bits, a scale for each group of them: one rounding for drafts
and targets.

    4 bits   w = (code - middle) * scale + zero    a pair per output and group of inputs
    8 bits   w = code * scale                      a scale per output (a group of inputs is rounded as an output of its own)
"""

from __future__ import annotations

import torch
from torch import Tensor


def four_bits(
    weight: Tensor, group_size: int, *, middle: int = 8, factors: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (out, in) uint8, scales and zeros (out, in / group) of weights (out, in) fp32."""
    groups = weight.view(weight.shape[0], -1, group_size)
    low = groups.amin(dim=2)
    high = groups.amax(dim=2)
    scales = _stored((high - low) / 15, factors)
    zeros = (low + middle * scales.float()).to(factors)
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round() + middle
    return codes.clamp(0, 15).to(torch.uint8).view_as(weight), scales, zeros


def eight_bits(weight: Tensor, *, factors: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Codes (out, in) int8 and scales (out,) of weights (out, in) fp32."""
    scales = _stored(weight.abs().amax(dim=1) / 127, factors)
    return (weight / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the type that the kernels read; never 0, so that codes can be found by division."""
    numbers = torch.finfo(dtype)
    # fp16: 2 ** -24, it reaches no further
    smallest = numbers.tiny * numbers.eps if dtype == torch.float16 else numbers.tiny
    return scales.clamp(min=smallest).to(dtype)
