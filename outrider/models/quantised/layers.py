"""Layers for integers or small floats with scales, in a layout that the kernels multiply and that
holds the same values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.huge_pages import on_huge_pages
from outrider.models.gguf.formats import (
    BLOCK,
    Q4,
    Q8,
    BlockParts,
    Form,
    own_form,
    pack_parts,
    zero_form,
)
from outrider.models.gguf.linear import BlockExperts, BlockLinear, ReorderedLinear
from outrider.models.linear.panel import WIDTH
from outrider.models.quantised.floats import SmallFloats
from outrider.models.quantised.formats import Codes, MalformedError

MAX_SHIFTED = 127  # what an int8 holds
INPUTS_AT_ONCE = 4  # of floats


def layer_of(codes: Codes | SmallFloats, dtype: torch.dtype, bias: Tensor | None) -> nn.Module:
    """The layer in blocks; with plain weights where no layout holds these values exactly."""
    outputs, inputs = codes.codes.shape
    made = panels_of(codes)
    if made is None:
        return _plain(codes.values().to(dtype), bias)
    panels, form = made
    linear = BlockLinear(on_huge_pages(panels), form, outputs, inputs, dtype, bias)
    return linear if codes.order is None else ReorderedLinear(linear, codes.order)


def joined(layers: Sequence[Codes | SmallFloats]) -> Codes | SmallFloats:
    """Layers with the same inputs as one. Raises MalformedError where their codes are of different
    kinds, or out of order."""
    first = layers[0]
    if isinstance(first, Codes):
        fit = all(
            isinstance(each, Codes)
            and each.order is None
            and (each.bits, each.scales.shape[1]) == (first.bits, first.scales.shape[1])
            for each in layers
        )
    else:
        fit = all(isinstance(each, SmallFloats) and each.form == first.form for each in layers)
    if not fit:
        raise MalformedError(
            "its bits or groups of inputs are not those of the other experts, or out of order "
            "(act-order)"
        )
    parts: dict[str, Any] = {
        name: torch.cat([getattr(each, name) for each in layers]) for name in _rows_of(first)
    }
    return replace(first, **parts)


def _rows_of(codes: Codes | SmallFloats) -> tuple[str, ...]:
    """The fields that have a row for each output."""
    return ("codes", "scales", "zeros") if isinstance(codes, Codes) else ("codes", "scales")


def experts_of(
    codes: Codes | SmallFloats, experts: int, dtype: torch.dtype, *, is_transposed: bool
) -> BlockExperts | None:
    """Layers of several experts, whose rows lie one after the other; None where no layout holds
    these values exactly."""
    outputs = len(codes.codes) // experts
    inputs = codes.codes.shape[1]
    lacking = -outputs % WIDTH  # panels are of one expert each
    parts = (
        {name: getattr(codes, name).view(experts, outputs, -1) for name in _rows_of(codes)}
        if lacking
        else {}
    )
    filled: dict[str, Any] = {
        name: torch.cat([part, part[:, -1:].expand(-1, lacking, -1)], 1).flatten(0, 1)
        for name, part in parts.items()
    }
    made = panels_of(replace(codes, **filled))
    if made is None:
        return None
    panels, form = made
    panels = on_huge_pages(panels.view(experts, -1, panels.shape[1]))
    return BlockExperts(panels, form, outputs, inputs, dtype, is_transposed=is_transposed)


def _plain(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.register_parameter(
        "bias", None if bias is None else nn.Parameter(bias, requires_grad=False)
    )
    return layer


def panels_of(found: Codes | SmallFloats) -> tuple[Tensor, Form] | None:
    """Panels and their layout; None where none holds these values."""
    if isinstance(found, SmallFloats):
        return _float_panels(found)
    group = found.group if found.scales.shape[1] > 1 else -(-found.codes.shape[1] // BLOCK) * BLOCK
    if group % BLOCK:
        return None
    codes = F.pad(found.codes, (0, found.scales.shape[1] * group - found.codes.shape[1]))
    halves, brains = (_exactly(found.scales, dtype) for dtype in (torch.float16, torch.bfloat16))
    is_symmetric = bool((found.zeros == 1 << found.bits - 1).all())
    if is_symmetric and halves is not None:
        form = replace(Q4 if found.bits == 4 else Q8, group=group)
        return pack_parts(BlockParts(codes, halves, None, None, None), form), form
    if is_symmetric and brains is not None:
        form = own_form(found.bits, group)
        return pack_parts(
            BlockParts(
                codes, brains, torch.zeros_like(brains) if form.has_zero else None, None, None
            ),
            form,
        ), form
    factors = halves if halves is not None else brains
    if factors is None:
        return None
    form = zero_form(found.bits, group, factors.dtype)
    shifts = found.zeros - form.middle
    if int(shifts.max()) > MAX_SHIFTED:
        return None
    shifts = shifts.to(torch.int8).repeat_interleave(group // BLOCK, dim=1)
    return pack_parts(
        BlockParts(codes, factors, factors, torch.ones_like(shifts), shifts), form
    ), form


def _float_panels(floats: SmallFloats) -> tuple[Tensor, Form] | None:
    inputs = floats.codes.shape[1]
    group = floats.form.group
    if group % BLOCK or inputs % INPUTS_AT_ONCE:
        return None
    codes = F.pad(floats.codes, (0, floats.scales.shape[1] * group - inputs))
    return pack_parts(BlockParts(codes, floats.scales, None, None, None), floats.form), floats.form


def _exactly(scales: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Scales as this type where it holds them all."""
    converted = scales.to(dtype)
    return converted if torch.equal(converted.double(), scales.double()) else None
