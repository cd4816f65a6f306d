"""A copy of a model with linear layers in 4 or 8 bits (`quantised_linear.py`): a draft from the
target's own weights.

Decoding a few rows costs what reading the weights costs, so a model of half or a quarter of the
bytes is a cheaper model that says nearly the same. What a draft rounds can cost acceptance, never
exactness.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.errors import CapabilityError
from outrider.models.derived.derive import is_linear, linear_shape, with_replaced
from outrider.models.derived.quantised_linear import (
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
    QuantisedPanels,
)

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
KERNELS = (
    "_weight_int8pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_convert_weight_to_int4pack_for_cpu",
)


def quantised_copy(
    module: Any, bits: int, group_size: int, *, head: bool, native: bool, name: str
) -> nn.Module:
    """The module with quantised linears, sharing everything else. `head`: the output layer, too;
    `native`: on our own kernel.

    Raises CapabilityError when there is nothing to quantise.
    """
    exact_head = None if head else module.get_output_embeddings()

    def quantised(layer: Any) -> QuantisedLinear:
        if native:
            return QuantisedPanels(layer, bits, group_size)
        return Int8Linear(layer) if bits == 8 else Int4Linear(layer, group_size)

    with torch.no_grad():
        copy = with_replaced(
            module,
            lambda part: quantised(part) if is_linear(part) and part is not exact_head else None,
        )
    if copy is module:
        raise CapabilityError(
            f"{name} has no linear layers that could be quantised. Use another drafter."
        )
    return copy


def added_bytes(module: nn.Module) -> int:
    """Memory that the quantised layers of a copy take alongside the model it was made from."""
    return sum(part.num_bytes for part in module.modules() if isinstance(part, QuantisedLinear))


def estimated_bytes(module: Any, bits: int, group_size: int, *, head: bool) -> int:
    """An estimate of `added_bytes`, without padding, before anything is made."""
    exact_head = None if head else module.get_output_embeddings()
    shapes = [
        linear_shape(part)
        for part in module.modules()
        if is_linear(part) and part is not exact_head
    ]
    if bits == 8:
        return sum(outputs * (inputs + 2) for outputs, inputs in shapes)
    return sum(
        outputs * inputs // 2 + 4 * outputs * inputs // group_size for outputs, inputs in shapes
    )


def check_kernels(device: torch.device) -> None:
    """Raises CapabilityError where torch's kernels do not exist."""
    if device.type != "cpu":
        raise CapabilityError(
            f"quantised drafts run on CPU kernels, but the model is on {device}. Use another "
            "drafter."
        )
    missing = [name for name in KERNELS if not hasattr(torch.ops.aten, name)]
    if missing:
        raise CapabilityError(
            f"torch {torch.__version__} has no {missing[0]}, which quantised drafts need (2.11 "
            "has it)"
        )
