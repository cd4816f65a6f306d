"""A plain checkpoint's linear layers, rounded to blocks of 4 or 8 bits while the model is loaded
(`quantise`).

The layouts are GGUF's Q4_1 and Q8_0, 32 inputs sharing a scale. As llama.cpp does, the output layer
keeps more bits than the rest (8), and so do what chooses experts and the matrix of latent attention
(all). A table of embeddings stays as it is: a pass reads a few of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.huge_pages import on_huge_pages
from outrider.lazy import transformers
from outrider.models.gguf.formats import (
    BLOCK,
    Q4_ZERO,
    Q8,
    ROWS_AT_ONCE,
    WIDTH,
    BlockParts,
    Form,
    pack_parts,
)
from outrider.models.gguf.linear import BlockLinear
from outrider.models.latent import MATRIX, has_latents
from outrider.models.linear.panel import is_plain, is_transposed, output_major
from outrider.models.linear.rounding import eight_bits, four_bits

ROUTERS = ("gate", "router", "shared_expert_gate")  # names of layers that choose experts


@dataclass(frozen=True)
class LayerToRound:
    """A layer to be rounded."""

    parent: nn.Module
    name: str
    layer: Any  # nn.Linear or Conv1D
    form: Form

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        first, second = self.layer.weight.shape
        return (second, first) if is_transposed(self.layer) else (first, second)

    @property
    def num_bytes(self) -> int:
        """Memory of the panels."""
        outputs, inputs = self.shape
        return -(-outputs // WIDTH) * self.form.panel_bytes(inputs)


@dataclass(frozen=True)
class Rounded:
    """The layers of a module that were quantised, with their bits, and those whose sizes no block
    holds."""

    bits: int
    layers: int
    left: int

    def note(self, label: str) -> str:
        """A note for the user about such a model, in a line."""
        why = f"experts, {MATRIX} of latents, or inputs that are no multiple of {BLOCK}"
        left = f"; {self.left} layers stay as they are ({why})" if self.left else ""
        output = "" if self.bits == 8 else ", its output layer to 8"
        return (
            f"'{label}' was rounded to {self.bits} bits on loading (--quantise){output}: another model than the "
            f"checkpoint, and the one that every result is about; passes are in bfloat16, and activations rounded to 8 bits{left}"
        )


def quantise_linears(module: Any, bits: int, label: str) -> Rounded:
    """Put a module's linear layers into blocks, in place. Raises CapabilityError where no layer can
    be."""
    layers, left = layers_to_round(module, bits)
    if not layers:
        raise CapabilityError(
            f"'{label}' has no linear layer that --quantise could round. Leave --quantise out."
        )
    dtype = module.get_input_embeddings().weight.dtype
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each layer is many small operations, which do not divide well
    try:
        with torch.no_grad(), ThreadPoolExecutor(threads) as pool:
            panels = pool.map(_panels, layers)
            while layers:  # a plain weight is freed as soon as its panels are there
                layer = layers.pop(0)
                bias = layer.layer.bias
                shape = layer.shape
                bias = None if bias is None else bias.detach()
                linear = BlockLinear(on_huge_pages(next(panels)), layer.form, *shape, dtype, bias)
                setattr(layer.parent, layer.name, linear)
    finally:
        torch.set_num_threads(threads)
    return Rounded(bits, sum(isinstance(part, BlockLinear) for part in module.modules()), left)


def layers_to_round(module: Any, bits: int) -> tuple[list[LayerToRound], int]:
    """The layers to be rounded, and how many others stay because no block holds them."""
    output = module.get_output_embeddings()
    layers = list[LayerToRound]()
    left = 0
    for parent in module.modules():
        # of several experts
        left += any(parameter.dim() > 2 for parameter in parent.parameters(recurse=False))
        for name, layer in parent.named_children():
            if not (isinstance(layer, nn.Linear) or is_transposed(layer)) or name in ROUTERS:
                continue
            form = Q8 if bits == 8 or layer is output else Q4_ZERO
            target_layer = LayerToRound(parent, name, layer, form)
            if (
                is_plain(layer)
                and target_layer.shape[1] % BLOCK == 0
                and not (name == MATRIX and has_latents(parent))
            ):
                layers.append(target_layer)
            else:
                left += 1
    return layers, left


def rounded_bytes(config: Any, dtype: torch.dtype, bits: int) -> tuple[int, int]:
    """Bytes that rounding frees and bytes of the blocks, from the config alone; zeros where no
    module can be made of it."""
    try:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception:  # noqa: BLE001  an estimate must not be the reason to refuse; loading will name the cause
        return 0, 0
    layers, _ = layers_to_round(module, bits)
    table = module.get_input_embeddings().weight
    freed = (
        sum(layer.layer.weight.numel() for layer in layers if layer.layer.weight is not table)
        * dtype.itemsize
    )
    return freed, sum(layer.num_bytes for layer in layers)


def rounded_parts(weight: Tensor, form: Form) -> BlockParts:
    """Weights (out, in) as codes and factors of this form, which shares a scale among 32 inputs."""
    blocks = weight.float().reshape(-1, form.group)
    if form.bits == 4:
        codes, scales, zeros = four_bits(
            blocks, form.group, middle=form.middle, factors=form.factors
        )
        return BlockParts(
            codes.view(weight.shape), _by_row(scales, weight), _by_row(zeros, weight), None, None
        )
    codes, scales = eight_bits(blocks, factors=form.factors)
    raised = (codes.to(torch.int16) + form.middle).to(torch.uint8)
    return BlockParts(raised.view(weight.shape), _by_row(scales, weight), None, None, None)


def _by_row(factors: Tensor, weight: Tensor) -> Tensor:
    return factors.reshape(weight.shape[0], -1)


def _panels(layer: LayerToRound) -> Tensor:
    rows: Iterator[Tensor] = iter(output_major(layer.layer).split(ROWS_AT_ONCE))
    return torch.cat([pack_parts(rounded_parts(some, layer.form), layer.form) for some in rows])
