"""The same model with its linear layers in 4 or 8 bits: a draft from the target's own weights.

Decoding a few rows costs what reading the weights costs, so a model of half or a quarter of the bytes is a cheaper model
that says nearly the same. Kernels are torch's own for CPU (those behind torchao's weight-only configurations):

    int4   w = (code - 8) * scale + zero    a pair per output and group of inputs   aten::_weight_int4pack_mm_for_cpu
    int8   w = code * scale                 a scale per output                      aten::_weight_int8pack_mm

Both multiply bf16 activations, for fp32 models too: with fp32 or fp16 activations the same kernels have no vector code
(torch 2.13, 8192x1024, 1 row, 1 thread: int8 0.5 ms from bf16 but 9 from fp32, where the plain fp32 product takes 1.6;
int4 15). What a draft rounds can cost acceptance, never exactness.

The int8 kernel reads beyond its input when that is no multiple of 16 wide (wrong numbers or a crash, no error), and int4
wants outputs in sixteens and inputs in whole groups: weights are padded with zeros to fit, so every shape is served.
A row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.models.derive import Linear, is_linear, linear_shape, weight_of, with_replaced

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
UNIT = 16  # inputs of the int8 kernel and outputs of the int4 kernel come in multiples of this
ROWS_AT_ONCE = 4096  # outputs quantised at a time, to bound the fp32 copies; a multiple of every kernel's block of outputs
KERNELS = ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")


class QuantisedLinear(nn.Module):
    """Drop-in for a linear layer, without gradients. Keeps codes and scales only; the bias stays the layer's own."""

    codes: Tensor  # (padded out, ...)
    scales: Tensor
    scales_output_dim = 0  # which dimension of `scales` counts outputs

    def __init__(self, layer: Linear, input_unit: int) -> None:
        """`input_unit`: inputs are padded to a multiple of this."""
        super().__init__()
        weight = weight_of(layer)
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.input_unit = input_unit
        self._padding = -self.in_features % input_unit
        blocks = [self._quantise(F.pad(rows.float(), (0, self._padding))) for rows in weight.split(ROWS_AT_ONCE)]
        codes, scales = zip(*blocks, strict=True)
        self.register_buffer("codes", torch.cat(codes))
        self.register_buffer("scales", torch.cat(scales, dim=self.scales_output_dim))

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if self._padding:
            rows = F.pad(rows, (0, self._padding))
        out = self._multiply(rows.contiguous())[:, : self.out_features].to(x.dtype)
        return (out if self.bias is None else out + self.bias).reshape(*x.shape[:-1], self.out_features)

    @property
    def num_bytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def _quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of up to ROWS_AT_ONCE outputs, from weights (out, padded in) fp32."""
        raise NotImplementedError

    def _multiply(self, rows: Tensor) -> Tensor:
        """(M, padded in) bf16 -> (M, padded out) bf16."""
        raise NotImplementedError


class Int8Linear(QuantisedLinear):
    """Symmetric: codes (out, in) int8, scales (out,) bf16."""

    def __init__(self, layer: Linear) -> None:
        super().__init__(layer, UNIT)

    def _quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        scales = _stored(weight.abs().amax(dim=1) / 127)
        codes = (weight / scales.float()[:, None]).round().clamp(-127, 127)
        return codes.to(torch.int8), scales

    def _multiply(self, rows: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(rows, self.codes, self.scales)


class Int4Linear(QuantisedLinear):
    """Asymmetric: codes in torch's packed layout, (out, in / 2) uint8; scales (in / group, out, 2) bf16 hold the zeros, too."""

    scales_output_dim = 1

    def __init__(self, layer: Linear, group_size: int) -> None:
        super().__init__(layer, group_size)

    def _quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = F.pad(weight, (0, 0, 0, -weight.shape[0] % UNIT))
        groups = weight.view(weight.shape[0], -1, self.input_unit)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scales = _stored((high - low) / 15)
        zeros = (low + 8 * scales.float()).to(torch.bfloat16)
        codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round() + 8
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.clamp(0, 15).to(torch.int32).view_as(weight), 1)
        return packed, torch.stack([scales.t(), zeros.t()], dim=2)

    def _multiply(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, self.input_unit, self.scales)


def quantised_copy(module: Any, bits: int, group_size: int, *, head: bool, name: str) -> nn.Module:
    """The module with quantised linears, sharing everything else. `head`: the output layer, too.

    Raises CapabilityError when there is nothing to quantise.
    """
    exact_head = None if head else module.get_output_embeddings()

    def replace(part: nn.Module) -> nn.Module | None:
        if not is_linear(part) or part is exact_head:
            return None
        return Int8Linear(part) if bits == 8 else Int4Linear(part, group_size)

    with torch.no_grad():
        copy = with_replaced(module, replace)
    if copy is module:
        raise CapabilityError(f"{name} has no linear layers that could be quantised. Use another drafter.")
    return copy


def added_bytes(module: nn.Module) -> int:
    """Memory that the quantised layers of a copy take beside the model it was made from."""
    return sum(part.num_bytes for part in module.modules() if isinstance(part, QuantisedLinear))


def estimated_bytes(module: Any, bits: int, group_size: int, *, head: bool) -> int:
    """What `added_bytes` will be, but for padding, before anything is made."""
    exact_head = None if head else module.get_output_embeddings()
    shapes = [linear_shape(part) for part in module.modules() if is_linear(part) and part is not exact_head]
    if bits == 8:
        return sum(outputs * (inputs + 2) for outputs, inputs in shapes)
    return sum(outputs * inputs // 2 + 4 * outputs * inputs // group_size for outputs, inputs in shapes)


def check_kernels(device: torch.device) -> None:
    """Raises CapabilityError where these kernels do not exist."""
    if device.type != "cpu":
        raise CapabilityError(f"quantised drafts run on CPU kernels, but the model is on {device}. Use another drafter.")
    missing = [name for name in KERNELS if not hasattr(torch.ops.aten, name)]
    if missing:
        raise CapabilityError(f"torch {torch.__version__} has no {missing[0]}, which quantised drafts need (2.11 has it)")


def _stored(scales: Tensor) -> Tensor:
    """As bf16, which the kernels read; never 0, so that codes can be found by division."""
    return scales.clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
