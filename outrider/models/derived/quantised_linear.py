"""Linear layers in 4 or 8 bits, on torch's kernels or on ours.

What the weights become (`rounding.py`) is the same for both:

    4 bits   w = (code - 8) * scale + zero    a pair per output and group of inputs
    8 bits   w = code * scale                 a scale per output

torch's kernels for CPU (those of torchao's weight-only configurations) serve every dtype and
are the reference. They multiply bf16 activations, for fp32 models too: with fp32 or fp16
activations they have no vector code (torch 2.13, 8192x1024, 1 row, 1 thread: int8 0.5 ms from bf16
but 9 from fp32, where the plain fp32 product takes 1.6; int4 15). The int8 one reads beyond its
input when that is no multiple of 16 wide (wrong numbers or a crash, no error), and int4 wants
outputs in sixteens and inputs in whole groups: weights are padded with zeros to fit, so every shape
is served.

Ours (`native/block_panels.h`) rounds activations to 8 bits, too, multiplies integers, and takes for
a few rows what reading the codes takes; it needs a bf16 model on native kernels. With either a
row's bits do not depend on the other rows of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.huge_pages import on_huge_pages
from outrider.models.derived.derive import weight_of
from outrider.models.gguf.formats import own_form, values_of
from outrider.models.linear.panel import WIDTH, KernelLayer
from outrider.models.linear.rounding import eight_bits, four_bits

if TYPE_CHECKING:
    from outrider.models.derived.derive import Linear

UNIT = 16  # inputs of torch's int8 kernel and outputs of its int4 kernel come in multiples of this
BLOCK = 32  # inputs that our kernel multiplies at once
# outputs quantised at a time, to bound the fp32 copies; a multiple of every kernel's block of
# outputs
ROWS_AT_ONCE = 4096


class QuantisedLinear(nn.Module):
    """Drop-in for a linear layer, without gradients. Keeps codes and scales only; the bias stays
    the layer's own."""

    codes: Tensor  # (padded out, ...)
    # buffers, and which dimension of each counts outputs
    kept: ClassVar[dict[str, int]] = {"codes": 0, "scales": 0}

    def __init__(self, layer: Linear, input_unit: int) -> None:
        """`input_unit`: inputs are padded to a multiple of this."""
        super().__init__()
        weight = weight_of(layer)
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.input_unit = input_unit
        self._padding = -self.in_features % input_unit
        blocks = [
            self._quantise(F.pad(rows.float(), (0, self._padding)))
            for rows in weight.split(ROWS_AT_ONCE)
        ]
        for (name, dim), parts in zip(self.kept.items(), zip(*blocks, strict=True), strict=True):
            self.register_buffer(name, on_huge_pages(torch.cat(parts, dim=dim)))

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if self._padding:
            rows = F.pad(rows, (0, self._padding))
        out = self._multiply(rows.contiguous())[:, : self.out_features].to(x.dtype)
        return (out if self.bias is None else out + self.bias).reshape(
            *x.shape[:-1], self.out_features
        )

    @property
    def num_bytes(self) -> int:
        """Memory of codes and scales."""
        return sum(getattr(self, name).nbytes for name in self.kept)

    def _quantise(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Quantise up to ROWS_AT_ONCE outputs of fp32 weights (out, padded in)."""
        raise NotImplementedError

    def _multiply(self, rows: Tensor) -> Tensor:
        """(M, padded in) bf16 -> (M, padded out) bf16."""
        raise NotImplementedError


class Int8Linear(QuantisedLinear):
    """torch's kernel: codes (out, in) int8, scales (out,) bf16."""

    scales: Tensor

    def __init__(self, layer: Linear) -> None:
        super().__init__(layer, UNIT)

    def _quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return eight_bits(weight)

    def _multiply(self, rows: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(rows, self.codes, self.scales)


class Int4Linear(QuantisedLinear):
    """torch's kernel: codes in its own layout, (out, in / 2) uint8; scales (in / group, out, 2)
    bf16 hold the zeros, too."""

    kept: ClassVar[dict[str, int]] = {"codes": 0, "scales": 1}
    scales: Tensor

    def __init__(self, layer: Linear, group_size: int) -> None:
        super().__init__(layer, group_size)

    def _quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales, zeros = four_bits(
            F.pad(weight, (0, 0, 0, -weight.shape[0] % UNIT)), self.input_unit
        )
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        return packed, torch.stack([scales.t(), zeros.t()], dim=2)

    def _multiply(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.codes, self.input_unit, self.scales
        )


class QuantisedPanels(QuantisedLinear, KernelLayer):
    """Our kernel, bf16: codes, scales and zeros side by side as it reads them, (out / 32, bytes)
    uint8."""

    kept: ClassVar[dict[str, int]] = {"codes": 0}

    def __init__(self, layer: Linear, bits: int, group_size: int) -> None:
        self.bits = bits  # not yet a module: plain numbers may be set
        super().__init__(layer, group_size if bits == 4 else BLOCK)
        self.form = own_form(bits, group_size if bits == 4 else self.in_features + self._padding)

    def _quantise(self, weight: Tensor) -> tuple[Tensor]:
        weight = F.pad(weight, (0, 0, 0, -weight.shape[0] % WIDTH))
        if self.bits == 4:
            codes, *factors = four_bits(weight, self.input_unit)
            return (panels_of(codes, factors, bits=4),)
        codes, scales = eight_bits(weight)
        return (
            panels_of((codes.to(torch.int16) + 128).to(torch.uint8), [scales[:, None]], bits=8),
        )

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        if self.kernel is not None and x.dtype == torch.bfloat16:
            return self.kernel(x)
        weight = values_of(self.codes, self.form, self.out_features)[:, : self.in_features]
        return F.linear(x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def panels_of(codes: Tensor, factors: list[Tensor], bits: int) -> Tensor:
    """(out / 32, bytes) uint8 as the native kernel reads them, from codes (out, in) uint8 and
    `factors` (out, groups) bf16."""
    panels = codes.shape[0] // WIDTH
    groups = factors[0].shape[1]
    # panel, half, 16 outputs, group, block, 4 inputs in turn, the 4 -> panel, group, block, inputs
    # in turn, half, output, the 4
    split = codes.view(panels, 2, WIDTH // 2, groups, -1, BLOCK // 4, 4).permute(
        0, 3, 4, 5, 1, 2, 6
    )
    if bits == 4:
        split = split[:, :, :, 0::2] | split[:, :, :, 1::2] << 4
    beside = [
        factor.view(panels, WIDTH, groups).transpose(1, 2).contiguous().view(torch.uint8)
        for factor in factors
    ]
    return torch.cat([*beside, split.reshape(panels, groups, -1)], dim=2).view(panels, -1)
