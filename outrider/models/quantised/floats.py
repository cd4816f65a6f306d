"""Weights in small floats with scales as other tools store them, taken apart: fp8 (e4m3), mxfp4 and
NVFP4 (e2m1).

    fp8     weight (out, in) e4m3; weight_scale_inv or weight_scale: one for the whole, for each output, or for each block of
            outputs and inputs; a weight is its number times its scale
    mxfp4   ..._blocks (..., out, groups, 16) uint8, two codes in each, the first in the low bits; ..._scales (..., out, groups)
            uint8: exponents of two raised by 127, one for 32 inputs
    NVFP4   weight or weight_packed (out, in / 2) uint8, codes as in mxfp4; weight_scale (out, in / 16) e4m3, times weight_scale_2
            (ModelOpt) or divided by weight_global_scale (compressed-tensors), one for the whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.gguf.formats import BLOCK, E2M1, Form, float_form
from outrider.models.quantised.formats import MalformedError, wanted

# no layout of the kernels
NVFP4 = Form(-1, 4, 0, group=16, factors=torch.float32, levels=E2M1.levels)
NO_NUMBER = 0xFF  # an exponent that stands for none


@dataclass(frozen=True)
class SmallFloats:
    """A linear layer's weights (out, in) as codes of one form."""

    form: Form
    codes: Tensor  # (out, in) uint8
    scales: Tensor  # (out, groups): fp32, or exponents uint8
    order: Tensor | None = None  # inputs are in order

    def values(self) -> Tensor:
        """The weights, fp32: what every other way to hold them is tested against."""
        scales = (
            self.scales.view(torch.float8_e8m0fnu)
            if self.scales.dtype == torch.uint8
            else self.scales
        )
        wide = scales.float().repeat_interleave(self.form.group, dim=1)[:, : self.codes.shape[1]]
        return self.form.numbers(self.codes) * wide


def fp8(parts: Mapping[str, Tensor], scale: str, block: tuple[int, int] | None) -> SmallFloats:
    """`scale`: the name of its scales; `block`: outputs and inputs that share one, where they are
    in blocks."""
    weight = wanted(parts, "weight")
    scales = wanted(parts, scale).float()
    if weight.dtype != torch.float8_e4m3fn:
        raise MalformedError(
            f"weight is {str(weight.dtype).removeprefix('torch.')}, not float8_e4m3fn"
        )
    codes = weight.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()) or not bool(torch.isfinite(scales).all()):
        raise MalformedError("it has weights or scales that are no numbers")
    outputs, inputs = weight.shape
    whole = -(-inputs // BLOCK) * BLOCK
    if scales.numel() == 1:
        return SmallFloats(
            float_form(whole), codes, scales.reshape(1, 1).expand(outputs, 1).contiguous()
        )
    if scales.numel() == outputs and (scales.dim() < 2 or scales.shape[1] == 1):
        return SmallFloats(float_form(whole), codes, scales.reshape(outputs, 1))
    high, wide = block or (1, inputs // scales.shape[-1])
    if scales.shape != (-(-outputs // high), -(-inputs // wide)):
        raise MalformedError(
            f"weight {tuple(weight.shape)} and {scale} {tuple(scales.shape)} do not fit together"
        )
    wide = whole if scales.shape[1] == 1 else wide
    return SmallFloats(
        float_form(wide), codes, scales.repeat_interleave(high, dim=0)[:outputs].contiguous()
    )


def mxfp4(blocks: Tensor, scales: Tensor) -> SmallFloats:
    """All experts' outputs in one row of outputs."""
    if (
        blocks.dtype != torch.uint8
        or scales.dtype != torch.uint8
        or blocks.shape != (*scales.shape, BLOCK // 2)
    ):
        raise MalformedError(
            f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} do not fit together"
        )
    if bool((scales == NO_NUMBER).any()):
        raise MalformedError("it has scales that are no numbers")
    codes = _nibbles(blocks).view(-1, scales.shape[-1] * BLOCK)
    return SmallFloats(E2M1, codes, scales.reshape(-1, scales.shape[-1]))


def nvfp4(parts: Mapping[str, Tensor], main: str) -> SmallFloats:
    """`main`: the name of the tensor with the codes."""
    packed = wanted(parts, main)
    scales = wanted(parts, "weight_scale")
    if packed.dtype != torch.uint8 or scales.shape != (
        packed.shape[0],
        packed.shape[1] * 2 // NVFP4.group,
    ):
        raise MalformedError(
            f"{main} {tuple(packed.shape)} and weight_scale {tuple(scales.shape)} do not fit "
            "together"
        )
    whole = parts.get("weight_scale_2")
    whole = 1 / wanted(parts, "weight_global_scale").float() if whole is None else whole.float()
    scales = scales.float() * whole.reshape(())
    if not bool(torch.isfinite(scales).all()):
        raise MalformedError("it has scales that are no numbers")
    return SmallFloats(NVFP4, _nibbles(packed).flatten(1), scales)


def _nibbles(packed: Tensor) -> Tensor:
    """Two codes of each byte, the first in the low bits: (..., n) -> (..., n, 2)."""
    return torch.stack([packed & 15, packed >> 4], dim=-1)
