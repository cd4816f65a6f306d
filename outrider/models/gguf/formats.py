"""Block formats of GGUF, taken apart into codes and factors, and laid out in panels of 32 outputs
for the native kernel.

    plain    w = scale * (code - middle) + zero                      factors in fp16, one for 32 inputs
    nested   w = (scale * step) * (code - middle) - zero * shift     scale and zero in fp16 for 256 inputs; step and shift are
                                                                     small integers for each 32 or
                                                                     16 of them

    panels[out / 32][in / 256 or 32]   32 scales, 32 zeros where there are some (fp16); then for each block of 32 inputs
    block    steps, shifts (nested alone, int8 [1 or 2][32]); codes: low bits [4][2][16 outputs][4 bytes] or all 8 of them
             [8][2][16][4]; fifth bits [2][64], or fifth and sixth [2][2][64], bits k of
             a byte for inputs in turn k

The values are those of gguf's `dequantize`, to the bit (`tests/unit/models/gguf/test_formats.py`).
Where a format has fewer bits than any of ours (Q3_K) or a table of levels (IQ4), its codes take the
next larger size.

Floats of 4 and 8 bits lie alike: mxfp4 with a byte's exponent for a scale, fp8 with scales in fp32,
of each four inputs the second and third exchanged (`native/float_panels.h`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.gguf import library
from outrider.models.linear.panel import WIDTH

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

BLOCK = 32  # inputs multiplied at once
SUPER = 256  # inputs that share a scale in nested formats
# outputs taken apart at a time, so that what lies next to them stays in the caches
ROWS_AT_ONCE = 256
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Form:
    """One layout of panels; `number` is what the native kernel calls it."""

    number: int
    bits: int
    middle: int  # the code that stands for no weight
    has_zero: bool = False
    is_nested: bool = False
    per_step: int = BLOCK  # inputs that share a step
    group: int = BLOCK  # inputs that share a scale
    factors: torch.dtype = torch.float16  # of scales and zeros
    levels: tuple[float, ...] = ()  # what codes stand for, where that is no step from `middle`
    # codes are numbers e4m3, multiplied as such: activations stay as they are
    is_float: bool = False

    def numbers(self, codes: Tensor) -> Tensor:
        """The unscaled values of codes, fp32."""
        if self.is_float:
            return codes.view(torch.float8_e4m3fn).float()
        return (
            torch.tensor(self.levels, device=codes.device)[codes.long()]
            if self.levels
            else codes.float() - self.middle
        )

    @property
    def factor_bytes(self) -> int:
        """Scales and zeros of a group in a panel."""
        return self.factors.itemsize * WIDTH * (2 if self.has_zero else 1)

    @property
    def step_bytes(self) -> int:
        """Steps and shifts of a block in a panel."""
        return (
            WIDTH * (BLOCK // self.per_step) * (2 if self.has_zero else 1) if self.is_nested else 0
        )

    @property
    def block_bytes(self) -> int:
        """A block in a panel."""
        return self.step_bytes + BLOCK * WIDTH * self.bits // 8

    def panel_bytes(self, inputs: int) -> int:
        """A panel of this many inputs; the last group is filled up with zeros."""
        return -(-inputs // self.group) * (
            self.factor_bytes + self.group // BLOCK * self.block_bytes
        )


Q4 = Form(0, 4, 8)
Q4_ZERO = Form(1, 4, 0, has_zero=True)
Q5 = Form(2, 5, 16)
Q5_ZERO = Form(3, 5, 0, has_zero=True)
Q8 = Form(4, 8, 128)
Q4_NESTED = Form(5, 4, 0, has_zero=True, is_nested=True, group=SUPER)
Q5_NESTED = Form(6, 5, 0, has_zero=True, is_nested=True, group=SUPER)
Q6_NESTED = Form(7, 6, 32, is_nested=True, per_step=16, group=SUPER)
Q8_NESTED = Form(8, 8, 128, is_nested=True, group=SUPER)
Q4_NESTED_16 = Form(9, 4, 0, has_zero=True, is_nested=True, per_step=16, group=SUPER)


E2M1_LEVELS = tuple(
    sign * level for sign in (1.0, -1.0) for level in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
E2M1 = Form(15, 4, 0, factors=torch.float8_e8m0fnu, levels=E2M1_LEVELS)


def float_form(group: int) -> Form:
    """The layout of fp8 (e4m3), `group` inputs sharing a scale."""
    return Form(16, 8, 0, group=group, factors=torch.float32, is_float=True)


def own_form(bits: int, group: int) -> Form:
    """The layout of `derived/quantised_linear.py`'s 4 or 8 bits, `group` inputs sharing a scale."""
    return replace(
        Form(10, 4, 8, has_zero=True) if bits == 4 else Form(11, 8, 128),
        group=group,
        factors=torch.bfloat16,
    )


def zero_form(bits: int, group: int, factors: torch.dtype) -> Form:
    """The layout of 4 or 8 bits with a zero among the codes.

    A weight is scale * (code - middle) - scale * shift, exact in fp32.
    """
    number = {
        (4, torch.float16): 5,
        (4, torch.bfloat16): 12,
        (8, torch.float16): 13,
        (8, torch.bfloat16): 14,
    }[bits, factors]
    middle = 0 if bits == 4 else 128
    return Form(number, bits, middle, has_zero=True, is_nested=True, group=group, factors=factors)


FORMS = {  # by the format's name
    "Q4_0": Q4, "Q4_1": Q4_ZERO, "Q5_0": Q5, "Q5_1": Q5_ZERO, "Q8_0": Q8, "IQ4_NL": Q8,
    "Q2_K": Q4_NESTED_16, "Q3_K": Q6_NESTED, "Q4_K": Q4_NESTED, "Q5_K": Q5_NESTED, "Q6_K": Q6_NESTED,
    "IQ4_XS": Q8_NESTED, "MXFP4": E2M1,
}  # fmt: skip


def known_forms(group: int) -> list[Form]:
    """All layouts that the native kernel has, with `group` inputs sharing a scale."""
    zeros = [
        zero_form(bits, group, dtype)
        for bits in (4, 8)
        for dtype in (torch.float16, torch.bfloat16)
    ]
    plain = [replace(form, group=group) for form in FORMS.values()]
    return [*plain, float_form(group), own_form(4, group), own_form(8, group), *zeros]


class BlockParts(NamedTuple):
    """Weights (out, in) taken apart."""

    codes: Tensor  # (out, in) uint8
    scales: Tensor  # (out, in / group) fp16; bytes where they are exponents
    zeros: Tensor | None  # the same shape
    steps: Tensor | None  # (out, in / per_step) int8
    shifts: Tensor | None


def panel_bytes(kind: GGMLQuantizationType, outputs: int, inputs: int) -> int:
    """Memory of weights (out, in) of this format in panels."""
    return -(-outputs // WIDTH) * FORMS[kind.name].panel_bytes(inputs)


def panels_of(blocks: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """(out, bytes of a row) uint8, as a file has them -> (ceil(out / 32), bytes of a panel) uint8,
    outputs padded with zeros."""
    form = FORMS[kind.name]
    return torch.cat(
        [_to_panels(_take_apart(rows, kind), form) for rows in blocks.split(ROWS_AT_ONCE)]
    )


def pack_parts(parts: BlockParts, form: Form) -> Tensor:
    """Panels of weights that are given as codes and scales, in whole groups of inputs."""
    cut = [
        [None] * -(-len(parts.codes) // ROWS_AT_ONCE) if part is None else part.split(ROWS_AT_ONCE)
        for part in parts
    ]
    return torch.cat(
        [_to_panels(_each_part(rows, lambda part: part), form) for rows in zip(*cut, strict=True)]
    )


def values_of(panels: Tensor, form: Form, outputs: int) -> Tensor:
    """Weights (out, in) fp32 of panels (panels, bytes)."""
    parts = _from_panels(panels, form)
    rows = panels.shape[0] * WIDTH
    codes = form.numbers(
        parts.codes.reshape(rows, -1, form.per_step if form.is_nested else form.group)
    )
    scales = parts.scales.float()
    if parts.steps is None:
        values = scales[..., None] * codes
        if parts.zeros is not None:
            values = values + parts.zeros.float()[..., None]
        return values.reshape(rows, -1)[:outputs]
    values = (_each(scales, form) * parts.steps.float())[..., None] * codes
    if parts.zeros is not None and parts.shifts is not None:
        values = values - (_each(parts.zeros.float(), form) * parts.shifts.float())[..., None]
    return values.reshape(rows, -1)[:outputs]


def _each(factors: Tensor, form: Form) -> Tensor:
    """Factors of groups, once for each step."""
    return factors.repeat_interleave(form.group // form.per_step, dim=1)


# ---------------------------------------------------------------- as a file has them


def _take_apart(rows: Tensor, kind: GGMLQuantizationType) -> BlockParts:
    _, size = library.GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(rows.shape[0], -1, size)  # (out, blocks, bytes)
    return _each_part(
        _TAKE[kind.name](blocks), lambda part: part.reshape(rows.shape[0], -1).contiguous()
    )


def _each_part(parts: Sequence[Tensor | None], change: Callable[[Tensor], Tensor]) -> BlockParts:
    codes, scales, *others = parts
    assert codes is not None
    assert scales is not None
    return BlockParts(
        change(codes), change(scales), *(None if part is None else change(part) for part in others)
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _fields(data: Tensor, bits: int, width: int) -> Tensor:
    """(..., bytes) -> (..., fields): of each `width` bytes first the lowest bits of all, then the
    next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    runs = data.reshape(*data.shape[:-1], -1, 1, width)
    return (runs >> shifts & (1 << bits) - 1).flatten(-3)


def _q4_0(b: Tensor) -> tuple[Tensor | None, ...]:
    return _fields(b[..., 2:18], 4, 16), _half(b, 0), None, None, None


def _q4_1(b: Tensor) -> tuple[Tensor | None, ...]:
    return _fields(b[..., 4:20], 4, 16), _half(b, 0), _half(b, 2), None, None


def _fifth(b: Tensor) -> Tensor:
    """Bit n of four bytes for weight n."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (b[..., None] >> shifts & 1).flatten(-2) << 4


def _q5_0(b: Tensor) -> tuple[Tensor | None, ...]:
    return _fields(b[..., 6:22], 4, 16) | _fifth(b[..., 2:6]), _half(b, 0), None, None, None


def _q5_1(b: Tensor) -> tuple[Tensor | None, ...]:
    return _fields(b[..., 8:24], 4, 16) | _fifth(b[..., 4:8]), _half(b, 0), _half(b, 2), None, None


def _q8_0(b: Tensor) -> tuple[Tensor | None, ...]:
    return b[..., 2:34] ^ 0x80, _half(b, 0), None, None, None  # signed bytes, raised by 128


def _levels(codes: Tensor) -> Tensor:
    return torch.tensor([level + 128 for level in IQ4_LEVELS], dtype=torch.uint8)[codes.long()]


def _iq4_nl(b: Tensor) -> tuple[Tensor | None, ...]:
    return _levels(_fields(b[..., 2:18], 4, 16)), _half(b, 0), None, None, None


def _mxfp4(b: Tensor) -> tuple[Tensor | None, ...]:
    return _fields(b[..., 1:17], 4, 16), b[..., 0:1], None, None, None


def _six_bits(b: Tensor) -> tuple[Tensor, Tensor]:
    """Eight steps and eight shifts of 6 bits each in 12 bytes."""
    first = b[..., 0:4]
    second = b[..., 4:8]
    rest = b[..., 8:12]
    steps = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=-1)
    shifts = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=-1)
    return steps.view(torch.int8), shifts.view(torch.int8)


def _q4_k(b: Tensor) -> tuple[Tensor | None, ...]:
    return _fields(b[..., 16:144], 4, 32), _half(b, 0), _half(b, 2), *_six_bits(b[..., 4:16])


def _q5_k(b: Tensor) -> tuple[Tensor | None, ...]:
    codes = _fields(b[..., 48:176], 4, 32) | _fields(b[..., 16:48], 1, 32) << 4
    return codes, _half(b, 0), _half(b, 2), *_six_bits(b[..., 4:16])


def _q6_k(b: Tensor) -> tuple[Tensor | None, ...]:
    codes = _fields(b[..., 0:128], 4, 64) | _fields(b[..., 128:192], 2, 32) << 4
    return codes, _half(b, 208), None, b[..., 192:208].contiguous().view(torch.int8), None


def _q2_k(b: Tensor) -> tuple[Tensor | None, ...]:
    steps = b[..., 0:16] & 15
    shifts = b[..., 0:16] >> 4
    return (
        _fields(b[..., 16:80], 2, 32),
        _half(b, 80),
        _half(b, 82),
        steps.view(torch.int8),
        shifts.view(torch.int8),
    )


def _q3_k(b: Tensor) -> tuple[Tensor | None, ...]:
    codes = (_fields(b[..., 32:96], 2, 32) | _fields(b[..., 0:32], 1, 32) << 2) + (
        32 - 4
    )  # w = code - 4: a code of 6 bits
    steps = _fields(b[..., 96:104], 4, 8) | _fields(b[..., 104:108], 2, 4) << 4
    return codes, _half(b, 108), None, steps.view(torch.int8) - 32, None


def _iq4_xs(b: Tensor) -> tuple[Tensor | None, ...]:
    low = torch.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], dim=-1).flatten(-2)
    high = (b[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    steps = (low | high << 4).view(torch.int8) - 32
    return _levels(_fields(b[..., 8:136], 4, 16)), _half(b, 0), None, steps, None


_TAKE = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}  # fmt: skip


# ---------------------------------------------------------------- as the kernel reads them


def _to_panels(parts: BlockParts, form: Form) -> Tensor:
    parts = _each_part(parts, _padded)
    panels = parts.codes.shape[0] // WIDTH
    groups = parts.codes.shape[1] // form.group
    blocks = form.group // BLOCK
    # panel, half, 16 outputs, group, block, inputs in turn, 4 inputs -> panel, group, block, in
    # turn, half, output, 4 inputs
    stored = _swapped(parts.codes) if form.is_float else parts.codes
    fours = stored.view(torch.int32).view(
        panels, 2, WIDTH // 2, groups, blocks, 8
    )  # four inputs at a time: four times as fast
    codes = fours.permute(0, 3, 4, 5, 1, 2).contiguous()[..., None].view(torch.uint8)
    within = [
        _bytes(part, panels, groups, blocks)
        for part in (parts.steps, parts.shifts)
        if part is not None
    ]
    if form.bits == 8:
        within.append(codes.flatten(3))
    else:
        low = codes & 15
        within.append((low[:, :, :, 0::2] | low[:, :, :, 1::2] << 4).flatten(3))
    if form.bits == 5:
        within.append(_gathered(codes >> 4, 1))
    if form.bits == 6:
        within += [_gathered(codes[:, :, :, start : start + 4] >> 4, 2) for start in (0, 4)]
    beside = [
        _factors(part, panels, groups) for part in (parts.scales, parts.zeros) if part is not None
    ]
    return torch.cat([*beside, torch.cat(within, dim=3).flatten(2)], dim=2).view(panels, -1)


def _from_panels(panels: Tensor, form: Form) -> BlockParts:
    """The opposite."""
    count = panels.shape[0]
    size = form.factor_bytes + form.group // BLOCK * form.block_bytes
    grouped = panels.view(count, -1, size)
    groups = grouped.shape[1]
    blocks = form.group // BLOCK
    factors = (
        grouped[..., : form.factor_bytes]
        .contiguous()
        .view(form.factors)
        .view(count, groups, -1, WIDTH)
    )
    scales, *zeros = (
        part.transpose(1, 2).reshape(count * WIDTH, groups) for part in factors.unbind(2)
    )
    within = grouped[..., form.factor_bytes :].reshape(count, groups, blocks, form.block_bytes)
    steps: list[Tensor] = []
    if form.is_nested:
        small = within[..., : form.step_bytes].contiguous().view(torch.int8)
        small = small.view(count, groups, blocks, -1, BLOCK // form.per_step, WIDTH)
        steps = [part.permute(0, 4, 1, 2, 3).reshape(count * WIDTH, -1) for part in small.unbind(3)]
    shape = (count, groups, blocks, 8, 2, WIDTH // 2, 4)
    stored = within[..., form.step_bytes :]
    if form.bits == 8:
        codes = stored.reshape(shape)
    else:
        low = stored[..., : BLOCK * WIDTH // 2].reshape(
            count, groups, blocks, 4, 1, 2, WIDTH // 2, 4
        )
        codes = torch.cat([low & 15, low >> 4], dim=4).reshape(shape)
        rest = stored[..., BLOCK * WIDTH // 2 :]
        if form.bits == 5:
            codes = codes | _spread(rest, 1).reshape(shape) << 4
        if form.bits == 6:
            halves = rest.reshape(count, groups, blocks, 2, -1)
            codes = (
                codes
                | torch.cat(
                    [
                        _spread(half, 2).reshape(*shape[:3], 4, 2, WIDTH // 2, 4)
                        for half in halves.unbind(3)
                    ],
                    3,
                )
                << 4
            )
    whole = codes.permute(0, 4, 5, 1, 2, 3, 6).reshape(count * WIDTH, -1)
    whole = _swapped(whole) if form.is_float else whole
    return BlockParts(whole, scales, zeros[0] if zeros else None, *[*steps, None, None][:2])


def _swapped(codes: Tensor) -> Tensor:
    """The second and third of each four inputs exchanged."""
    return codes.view(codes.shape[0], -1, 4)[..., [0, 2, 1, 3]].reshape(codes.shape)


def _padded(part: Tensor) -> Tensor:
    return F.pad(part, (0, 0, 0, -part.shape[0] % WIDTH))


def _factors(part: Tensor, panels: int, groups: int) -> Tensor:
    return part.view(panels, WIDTH, groups).transpose(1, 2).contiguous().view(torch.uint8)


def _bytes(part: Tensor, panels: int, groups: int, blocks: int) -> Tensor:
    return (
        part.view(panels, WIDTH, groups, blocks, -1)
        .permute(0, 2, 3, 4, 1)
        .contiguous()
        .view(torch.uint8)
        .flatten(3)
    )


def _gathered(fields: Tensor, bits: int) -> Tensor:
    """(panels, groups, blocks, in turn, half, output, 4) of this many bits -> (panels, groups,
    blocks, bytes)."""
    values = torch.zeros_like(fields[:, :, :, 0])
    for turn in range(8 // bits):
        values |= fields[:, :, :, turn] << turn * bits
    return values.flatten(3)


def _spread(data: Tensor, bits: int) -> Tensor:
    """The opposite: (..., bytes) -> (..., in turn, bytes)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    return data[..., None, :] >> shifts & (1 << bits) - 1
