"""Linear layers on our own CPU kernel: bf16 weights in panels, read at the speed of memory
(`runtime/native/panel.h`).

On a 2-core AVX-512 CPU the 160 MB of an 80M-parameter target take 5 ms for 1 row and 5.7 for 8,
where oneDNN's packed linears take 8 to 11 (same hour, same weights); with matrix tiles (AMX) 16
rows cost what 1 does. A row's bits do not depend on the other rows of the batch, by construction.
`nn.Linear` stays the reference (`tests/unit/runtime/test_layers.py`); where the kernel cannot be
had, `pack.py` serves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.lazy import transformers


class LayerKernel(Protocol):
    """One layer on the native library (`runtime/layers.py`). bf16 in and out."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows(self, tokens: Tensor) -> Tensor: ...


class KernelLayer(nn.Module):
    """A layer that the library may multiply; without a kernel it widens its weights for each call:
    the reference, and slow."""

    kernel: LayerKernel | None = None


# puts all such layers of a module on the library, and gives it
Kernels: TypeAlias = Callable[[nn.Module], ctypes.CDLL]


if TYPE_CHECKING:
    from transformers.pytorch_utils import Conv1D

WIDTH = 32  # outputs of a panel, as in runtime/native/panel.h


def is_transposed(layer: nn.Module) -> bool:
    """Whether this is GPT-2's linear layer, which keeps its weight as (in, out)."""
    return isinstance(layer, transformers.pytorch_utils.Conv1D)


def is_plain(layer: nn.Module) -> bool:
    """Whether this is a linear layer of torch's or GPT-2's class: a subclass may do more than
    multiply."""
    return type(layer) in (nn.Linear, transformers.pytorch_utils.Conv1D)


def fits(layer: Any) -> bool:
    """Whether this is a linear layer that can be stored in panels: bf16 and an even number of
    inputs."""
    if not is_plain(layer):
        return False
    inputs = layer.weight.shape[0 if is_transposed(layer) else 1]
    return layer.weight.dtype == torch.bfloat16 and inputs % 2 == 0


def output_major(linear: nn.Linear | Conv1D) -> Tensor:
    """The weight as (out, in), whichever way the layer keeps it."""
    weight = linear.weight.detach()
    return weight.t().contiguous() if is_transposed(linear) else weight


def to_panels(weight: Tensor) -> Tensor:
    """(out, in) -> (ceil(out / 32), in / 2, 32, 2), zero-padded."""
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, 0, 0, -outputs % WIDTH))
    if weight.dtype.itemsize == 2:  # a pair is moved as one number: a third of the time
        pairs = (
            padded.contiguous()
            .view(torch.int32)
            .view(-1, WIDTH, inputs // 2)
            .transpose(1, 2)
            .contiguous()
        )
        return pairs.view(weight.dtype).view(-1, inputs // 2, WIDTH, 2)
    return padded.view(-1, WIDTH, inputs // 2, 2).transpose(1, 2).contiguous()


class PanelLinear(KernelLayer):
    """Drop-in for `nn.Linear` (and GPT-2's transposed `Conv1D`) without gradients. Keeps the panels
    only."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = output_major(linear)
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self.panels = nn.Parameter(to_panels(weight), requires_grad=False)
        self.bias = (
            None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        )

    @property
    def weight(self) -> Tensor:
        """A plain copy (out, in), for model code that reads it (the router of HunYuan MoE asks for
        its dtype)."""
        rows = self.panels.detach().transpose(1, 2).reshape(-1, self.in_features)
        return rows[: self.out_features]

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        if self.kernel is not None and x.dtype == torch.bfloat16:
            return self.kernel(x)
        return F.linear(x, self.weight.to(x.dtype), self.bias)
