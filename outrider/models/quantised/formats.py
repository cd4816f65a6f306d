"""Integers and scales as other tools store them, taken apart.

w[o, i] = scale[o, g] * (code[o, i] - zero[o, g])    g: the group of input i

GPTQ        qweight (in / n, out), qzeros (groups, out / n), n codes in an int32, the first in the lowest bits; scales
            (groups, out); g_idx (in,) the group of each input. Zeros are stored one smaller,
            but for the layout gptq_v2. AutoRound packs so, too, without g_idx.
AWQ         qweight (in, out / 8), qzeros (groups, out / 8), scales (groups, out); the eight outputs of an int32 stand in the
            order 0 2 4 6 1 3 5 7 (layout "gemm").
compressed-tensors, pack-quantized: weight_packed (out, in / n), weight_scale (out, groups),
weight_zero_point
            (out / n, groups), weight_shape; codes and zeros are raised by half their range
            int-quantized: weight (out, in) int8, weight_scale, weight_zero_point
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 32  # bits that codes are packed in
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class MalformedError(ValueError):
    """Tensors that do not make up a layer; the message says why."""


@dataclass(frozen=True)
class Codes:
    """A linear layer's weights (out, in) as integers. `order`: which input each column is of, None
    where they are in order."""

    bits: int
    codes: Tensor  # (out, in) uint8
    scales: Tensor  # (out, groups), as stored
    zeros: Tensor  # (out, groups) int16
    order: Tensor | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> Tensor:
        """The weights, fp32: what every other way to hold them is tested against."""
        codes = self.codes.to(torch.int16).view(*self.scales.shape, self.group)
        values = (self.scales.float()[..., None] * (codes - self.zeros[..., None])).view(
            self.codes.shape
        )
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)


def bits_of(parts: Mapping[str, Tensor]) -> int:
    """Bits of a code in GPTQ's words, which each layer may have its own of: by the words that its
    outputs' zeros take."""
    words = wanted(parts, "qzeros").shape[-1]
    outputs = wanted(parts, "scales").shape[-1]
    if words * WORD not in (4 * outputs, 8 * outputs):
        raise MalformedError(
            f"its zeros take {words * WORD / outputs:g} bits each; 4 and 8 can be read"
        )
    return words * WORD // outputs


def bits_in_words(parts: Mapping[str, Tensor]) -> int:
    """Bits of a code in compressed-tensors' words, which each layer may have its own of: by the
    words that its inputs take."""
    words = wanted(parts, "weight_packed").shape[1]
    inputs = int(wanted(parts, "weight_shape")[1])
    num_bits = next((bits for bits in (4, 8) if words == -(-inputs * bits // WORD)), None)
    if num_bits is None:
        raise MalformedError(
            f"its codes take {words * WORD / inputs:g} bits each; 4 and 8 can be read"
        )
    return num_bits


def gptq(parts: Mapping[str, Tensor], bits: int, *, zeros_are_less: bool) -> Codes:
    """`zeros_are_less`: stored one smaller than they are, as all but gptq_v2 do."""
    words = wanted(parts, "qweight")
    scales = wanted(parts, "scales")
    codes = unpack(words, bits, dim=0).t().contiguous()
    stored = wanted(parts, "qzeros")
    # added to whole words, as the writer subtracted it: a zero of 0 borrows
    if zeros_are_less and stored.dtype == torch.int32:
        stored = stored + sum(1 << at for at in range(0, WORD, bits))
    zeros = unpack(stored, bits, dim=1).to(torch.int16)[:, : scales.shape[1]].t()
    groups = parts.get("g_idx")
    return _checked(bits, codes, scales.t(), zeros, None if groups is None else groups.long())


def awq(parts: Mapping[str, Tensor], bits: int) -> Codes:
    words = wanted(parts, "qweight")
    scales = wanted(parts, "scales")
    codes, zeros = (
        _in_order(unpack(each, bits, dim=1)) for each in (words, wanted(parts, "qzeros"))
    )
    return _checked(bits, codes.t().contiguous(), scales.t(), zeros.to(torch.int16).t(), None)


def packed(parts: Mapping[str, Tensor], bits: int) -> Codes:
    """compressed-tensors' pack-quantized."""
    scales = wanted(parts, "weight_scale")
    outputs, inputs = (int(size) for size in wanted(parts, "weight_shape"))
    codes = unpack(wanted(parts, "weight_packed"), bits, dim=1)[:, :inputs].contiguous()
    zeros = torch.full(scales.shape, 1 << bits - 1, dtype=torch.int16)
    if (stored := parts.get("weight_zero_point")) is not None:
        zeros = unpack(stored, bits, dim=0)[:outputs].to(torch.int16)
    groups = parts.get("weight_g_idx")
    return _checked(
        bits, codes, scales, zeros, None if groups is None or (groups < 0).any() else groups.long()
    )


def integers(parts: Mapping[str, Tensor]) -> Codes:
    """compressed-tensors' int-quantized: a scale for the whole, for each output, or for each group."""
    stored = wanted(parts, "weight")
    scales = wanted(parts, "weight_scale")
    if stored.dtype != torch.int8:
        raise MalformedError(f"weight is {str(stored.dtype).removeprefix('torch.')}, not int8")
    scales = scales.reshape(-1, 1 if scales.dim() < 2 else scales.shape[-1]).expand(
        stored.shape[0], -1
    )
    zeros = torch.zeros(scales.shape, dtype=torch.int16)
    if (zero_point := parts.get("weight_zero_point")) is not None:
        zeros = zero_point.to(torch.int16).reshape(-1, scales.shape[1]).expand(scales.shape)
    return _checked(8, (stored.to(torch.int16) + 128).to(torch.uint8), scales, zeros + 128, None)


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words as codes uint8 along this dimension, the lowest bits first."""
    if words.dtype != torch.int32:
        raise MalformedError(
            f"codes are packed in {str(words.dtype).removeprefix('torch.')}, not in int32"
        )
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    fields = (
        words.unsqueeze(dim + 1) >> shifts.view(-1, *(1,) * (words.dim() - dim - 1))
        & (1 << bits) - 1
    )
    return fields.to(torch.uint8).flatten(dim, dim + 1)


def _in_order(codes: Tensor) -> Tensor:
    """(n, out) as AWQ's words have them -> outputs in order."""
    ordered = torch.empty_like(codes)
    ordered.view(codes.shape[0], -1, len(AWQ_ORDER))[..., list(AWQ_ORDER)] = codes.view(
        codes.shape[0], -1, len(AWQ_ORDER)
    )
    return ordered


def wanted(parts: Mapping[str, Tensor], name: str) -> Tensor:
    """A layer's tensor of this name. Raises MalformedError where it is missing."""
    if name not in parts:
        raise MalformedError(f"{name} is missing (there are {', '.join(sorted(parts))})")
    return parts[name]


def _checked(
    bits: int, codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None
) -> Codes:
    """Columns brought into the order of their groups."""
    (outputs, inputs) = codes.shape
    (rows, count) = scales.shape
    if rows != outputs or zeros.shape != scales.shape or count < 1 or inputs % count:
        shapes = [str(tuple(each.shape)) for each in (codes, scales, zeros)]
        raise MalformedError(
            f"codes {shapes[0]}, scales {shapes[1]} and zeros {shapes[2]} do not fit together"
        )
    order = None
    if groups is not None and not torch.equal(groups, torch.arange(inputs) // (inputs // count)):
        order = torch.argsort(groups, stable=True)
        sizes = torch.bincount(groups, minlength=count)
        if groups.shape != (inputs,) or not torch.equal(
            sizes, torch.full((count,), inputs // count)
        ):
            raise MalformedError("groups of inputs (g_idx) are of different sizes")
        codes = codes[:, order]
    return Codes(bits, codes.contiguous(), scales.contiguous(), zeros.contiguous(), order)
