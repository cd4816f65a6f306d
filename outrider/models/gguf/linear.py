"""Layers whose weights stay in blocks: a linear layer, those of experts, and a table of embeddings
that looks up single rows.

On the native kernels (bf16) all read their panels as they are (`native/block_panels.h`):
activations are rounded to 8 bits, 32 at a time with a scale of their own, as llama.cpp does, and
multiplied as integers; fp8 is multiplied as it is (`native/float_panels.h`). Elsewhere the weights
of a layer are widened for each use and dropped again: the reference, and slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.gguf.formats import WIDTH, Form, values_of
from outrider.models.linear.panel import KernelLayer


class WeightPanels(nn.Module):
    """Weights (out, in) in panels. Without gradients."""

    panels: Tensor  # ([experts,] ceil(out / 32), bytes of a panel) uint8

    def __init__(
        self, panels: Tensor, form: Form, outputs: int, inputs: int, dtype: torch.dtype
    ) -> None:
        """`dtype`: of what comes out, and of `weight`."""
        super().__init__()
        self.register_buffer("panels", panels)
        self.form = form
        self.dtype = dtype
        self.outputs = outputs
        self.inputs = inputs

    @property
    def weight(self) -> Tensor:
        """A plain copy (out, in)."""
        return values_of(self.panels, self.form, self.outputs)[:, : self.inputs].to(self.dtype)

    @property
    def num_weights(self) -> int:
        return self.outputs * self.inputs

    def extra_repr(self) -> str:
        return f"{self.outputs}, {self.inputs}, {self.form.bits} bits"


class BlockLinear(WeightPanels, KernelLayer):
    """Drop-in for `nn.Linear`, and for GPT-2's transposed `Conv1D`."""

    bias: Tensor | None

    def __init__(
        self,
        panels: Tensor,
        form: Form,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__(panels, form, outputs, inputs, dtype)
        self.out_features = outputs
        self.in_features = inputs
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        if self.kernel is not None and x.dtype == torch.bfloat16:
            return self.kernel(x)
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class ReorderedLinear(nn.Module):
    """A layer whose inputs are put into the order that it is stored in first: GPTQ's act-order,
    Qwen3.5's value heads in GGUF."""

    order: Tensor

    def __init__(self, inner: BlockLinear, order: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("order", order)

    @property
    def weight(self) -> Tensor:
        """A plain copy (out, in)."""
        weight = self.inner.weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    @property
    def bias(self) -> Tensor | None:
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return self.inner(x.index_select(-1, self.order))


class BlockEmbedding(WeightPanels, KernelLayer):
    """Drop-in for `nn.Embedding`; `scale` multiplies what is looked up, as Gemma's class does."""

    scale: Tensor | None

    def __init__(
        self,
        panels: Tensor,
        form: Form,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        scale: Tensor | None = None,
    ) -> None:
        super().__init__(panels, form, outputs, inputs, dtype)
        self.num_embeddings = outputs
        self.embedding_dim = inputs
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (...) -> (..., in)
        embedded = self.rows(tokens)
        return embedded if self.scale is None else embedded * self.scale.to(embedded.dtype)

    def rows(self, tokens: Tensor) -> Tensor:
        """The rows themselves, unscaled."""
        if self.kernel is not None:
            return self.kernel.rows(tokens)
        flat = tokens.reshape(-1)
        near = values_of(self.panels[flat // WIDTH], self.form, flat.numel() * WIDTH).view(
            -1, WIDTH, self.inputs
        )
        values = near[torch.arange(flat.numel(), device=flat.device), flat % WIDTH]
        return values.to(self.dtype).view(*tokens.shape, self.inputs)


class BlockExperts(WeightPanels):
    """Weights of a linear layer of several experts, in place of the parameter that transformers'
    code takes one expert's from."""

    def __init__(
        self,
        panels: Tensor,
        form: Form,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        *,
        is_transposed: bool,
    ) -> None:
        """`is_transposed`: transformers' code multiplies with (in, out)."""
        super().__init__(panels, form, outputs, inputs, dtype)
        self.is_transposed = is_transposed

    def __len__(self) -> int:
        return len(self.panels)

    def __getitem__(self, index: Any) -> Tensor:
        """A plain copy of one expert's weights, as transformers' code multiplies with them."""
        row = values_of(self.panels[int(index)], self.form, self.outputs)[:, : self.inputs].to(
            self.dtype
        )
        return row.t() if self.is_transposed else row

    @property
    def num_weights(self) -> int:
        return len(self) * self.outputs * self.inputs


def put_experts(owner: Any, name: str, experts: BlockExperts) -> None:
    """Put the weights of all experts in the place of a parameter of transformers' module."""
    owner._parameters.pop(name, None)
    owner.add_module(name, experts)
    owner.config._experts_implementation = "eager"  # the one that reads one expert at a time


def runs_on_kernels(module: nn.Module) -> bool:
    """Whether all layers in blocks that have kernels are on them."""
    return all(
        layer.kernel is not None for layer in block_layers(module) if isinstance(layer, KernelLayer)
    )


def block_layers(module: nn.Module) -> Iterator[WeightPanels]:
    """All layers of a module that keep their blocks."""
    return (part for part in module.modules() if isinstance(part, WeightPanels))
