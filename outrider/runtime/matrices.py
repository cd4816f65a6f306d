"""Weights that layers keep in integers or small floats, which the executor multiplies as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.derived.quantised_linear import QuantisedPanels
from outrider.models.gguf.formats import BLOCK, Form, known_forms, values_of
from outrider.models.gguf.linear import BlockEmbedding, BlockLinear
from outrider.models.linear.panel import WIDTH
from outrider.runtime.coding import are_whole
from outrider.runtime.structures import WeightFormat


@dataclass(frozen=True)
class Matrix:
    """Weights (outputs, inputs) that a layer keeps in blocks: panels of `gguf/formats.py`, of one
    layer or of several experts."""

    panels: Tensor
    form: Form
    outputs: int
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def format(self) -> WeightFormat:
        """How the executor multiplies them."""
        return WeightFormat.FLOATS if self.form.is_float else WeightFormat.BLOCKS

    @property
    def experts(self) -> int:
        """Layers that lie one after the other; 0: it is none of experts."""
        return len(self.panels) if self.panels.dim() == 3 else 0

    @property
    def is_whole(self) -> bool:
        """Whether the executor knows the form, and the panels are as many bytes as it reads."""
        form = self.form
        panels = self.panels
        shape = (-(-self.outputs // WIDTH), self.form.panel_bytes(self.inputs))
        is_known = (
            form in known_forms(form.group) and form.group >= BLOCK and form.group % BLOCK == 0
        )
        is_plain = panels.element_size() == 1 and panels.is_contiguous() and panels.dim() in (2, 3)
        return is_known and is_plain and panels.shape[-2:] == shape

    def values(self) -> Tensor:
        """A plain copy, fp32; (experts, outputs, inputs) where there are some."""
        if self.experts:
            return torch.stack(
                [
                    values_of(panel, self.form, self.outputs)[:, : self.inputs]
                    for panel in self.panels
                ]
            )
        return values_of(self.panels, self.form, self.outputs)[:, : self.inputs]


@dataclass(frozen=True)
class PackedWeight:
    """A plain weight (outputs, inputs), or one for each of several experts, that lies in panels
    already."""

    panels: Tensor
    dtype: torch.dtype  # of its numbers
    outputs: int
    inputs: int
    experts: int  # 0: it is none of experts
    transposed: bool  # the module has it as (inputs, outputs)
    table: Tensor | None = None  # the weight itself, where its rows are embeddings, too

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def plain_bytes(self) -> int:
        """Bytes of its numbers outside panels."""
        return max(1, self.experts) * self.outputs * self.inputs * self.dtype.itemsize

    @property
    def format(self) -> WeightFormat:
        """How the executor multiplies it."""
        if self.panels.dtype == torch.uint8:
            return WeightFormat.PANELS_CODED
        is_bf16 = self.dtype == torch.bfloat16
        return WeightFormat.PANELS_BF16 if is_bf16 else WeightFormat.PANELS_FP32

    @cached_property
    def is_whole(self) -> bool:
        """Whether the panels have the form and size that the executor reads."""
        panels = self.panels
        if not panels.is_contiguous() or panels.device.type != "cpu":
            return False
        if self.format == WeightFormat.PANELS_CODED:
            is_bf16 = self.dtype == torch.bfloat16
            return is_bf16 and are_whole(panels, max(1, self.experts), self.shape)
        return panels.dtype == self.dtype and panels.shape == self._panels_shape()

    def _panels_shape(self) -> tuple[int, ...]:
        count = -(-self.outputs // WIDTH)
        experts = (self.experts,) if self.experts else ()
        if self.dtype == torch.bfloat16:
            return *experts, count, self.inputs // 2, WIDTH, 2
        return *experts, count, self.inputs, WIDTH


def keeps_integers(part: nn.Module) -> bool:
    """Whether calls of this module are one operation: its weights are not for torch to multiply."""
    return isinstance(part, BlockLinear | BlockEmbedding | QuantisedPanels)


def matrix_of(layer: Any) -> Matrix:
    """The weights of such a module, shared with it."""
    if isinstance(layer, QuantisedPanels):
        return Matrix(layer.codes, layer.form, layer.out_features, layer.in_features)
    return Matrix(layer.panels, layer.form, layer.outputs, layer.inputs)
