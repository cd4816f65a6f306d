"""Weights packed once for oneDNN: the fast CPU path of every linear layer.

A plain bf16 or fp32 linear re-packs or streams its weights in an unfortunate order on each call; a
packed one reads them in blocks laid out for the machine. On a 2-core AVX-512 CPU, bf16, 8192x384:
0.07 ms against 0.18 ms for one row, and 8 rows cost little more than one. The packed product of a
row also has the same bits alongside one neighbour or a hundred (fp32 included, where the plain one
differs), except that many shapes treat a single row specially: `LM` never sends one.

The plain `nn.Linear` stays the reference; `tests/unit/models/linear/test_pack.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.models.linear.panel import PanelLinear, fits, is_plain, output_major

if TYPE_CHECKING:
    from transformers.pytorch_utils import Conv1D

PACKABLE = (torch.bfloat16, torch.float32)


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear` (and GPT-2's transposed `Conv1D`) without gradients. Keeps the packed
    weights only."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = output_major(linear)
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        self.bias = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """A plain copy (out, in), for model code that reads it (the router of HunYuan MoE asks for
        its dtype)."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device and dtype have packed kernels."""
    has_kernels = (
        device.type == "cpu" and dtype in PACKABLE and torch.backends.mkldnn.is_available()
    )
    return has_kernels and (dtype != torch.bfloat16 or has_fast_bf16())


def has_fast_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU: with AVX-512, or AVX-NE-CONVERT."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_linears(model: nn.Module) -> int:
    """Put every linear layer of the model into oneDNN's layout; returns how many."""
    return _replace(model, PackedLinear, is_plain)


def panel_linears(model: nn.Module) -> int:
    """Put every linear layer that fits into panels, for the native kernel; returns how many."""
    return _replace(model, PanelLinear, fits)


def _replace(
    model: nn.Module, kind: Callable[[Any], nn.Module], wanted: Callable[[nn.Module], bool]
) -> int:
    """In place. Tied weights get their own packed copy."""
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if wanted(child)
    ]
    # one at a time, so that each plain weight is freed before the next is packed
    for parent, name in places:
        setattr(parent, name, kind(getattr(parent, name)))
    return len(places)
