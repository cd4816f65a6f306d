"""Weights that layers keep in integers, which the executor multiplies as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outrider.models.gguf.formats import Form, values_of
from outrider.models.gguf.linear import BlockEmbedding, BlockLinear
from outrider.models.quantised_linear import QuantisedPanels


@dataclass(frozen=True)
class Matrix:
    """Weights (outputs, inputs) that a layer keeps in integers: panels of `gguf/formats.py`."""

    panels: Tensor
    form: Form
    outputs: int
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def values(self) -> Tensor:
        """A plain copy, fp32."""
        return values_of(self.panels, self.form, self.outputs)[:, : self.inputs]


def keeps_integers(part: nn.Module) -> bool:
    """Whether calls of this module are one operation: its weights are not for torch to multiply."""
    return isinstance(part, BlockLinear | BlockEmbedding | QuantisedPanels)


def matrix_of(layer: Any) -> Matrix:
    """The weights of such a module, shared with it."""
    if isinstance(layer, QuantisedPanels):
        return Matrix(layer.codes, layer.form, layer.out_features, layer.in_features)
    return Matrix(layer.panels, layer.form, layer.outputs, layer.inputs)
