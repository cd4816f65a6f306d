"""Weights that layers keep in integers or small floats, which the executor multiplies as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.derived.quantised_linear import QuantisedPanels
from outrider.models.gguf.formats import BLOCK, Form, known_forms, values_of
from outrider.models.gguf.linear import BlockEmbedding, BlockLinear
from outrider.models.linear.panel import WIDTH
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


def keeps_integers(part: nn.Module) -> bool:
    """Whether calls of this module are one operation: its weights are not for torch to multiply."""
    return isinstance(part, BlockLinear | BlockEmbedding | QuantisedPanels)


def matrix_of(layer: Any) -> Matrix:
    """The weights of such a module, shared with it."""
    if isinstance(layer, QuantisedPanels):
        return Matrix(layer.codes, layer.form, layer.out_features, layer.in_features)
    return Matrix(layer.panels, layer.form, layer.outputs, layer.inputs)
