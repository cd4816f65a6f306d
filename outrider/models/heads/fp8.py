"""Weights of heads that are stored in fp8: recognised by the headers of safetensors files, widened by their scales."""

from __future__ import annotations

from torch import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"
SCALES = ("weight_scale_inv", "weight_scale")  # of weights in fp8, in blocks or whole


def widened(weight: Tensor, scale: Tensor) -> Tensor:
    """Weights (out, in) in fp8 times their scales: one, one a row, or one for each block."""
    values = weight.float()
    if scale.dim() == 2:
        sizes = [-(-whole // parts) for whole, parts in zip(values.shape, scale.shape, strict=True)]
        sizes = [1 << (size - 1).bit_length() for size in sizes]  # blocks at the edge are cut
        scale = scale.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[: values.shape[0], : values.shape[1]]
    return values * scale.float()
