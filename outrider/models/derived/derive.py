"""Models made from a loaded model's own weights: drafts that need no second checkpoint.

A derived model is the same tree of transformers' modules with some parts replaced (quantised
linears, left-out layers) and everything else shared, not copied: embeddings, norms, rotary tables,
the layers that stay. The target may already be packed for oneDNN or stored in panels by then;
`weight_of` reads its weights back from either, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.models.gguf.linear import BlockLinear
from outrider.models.linear.pack import PackedLinear
from outrider.models.linear.panel import PanelLinear, is_plain, is_transposed, output_major
from outrider.models.lm import LM, module_run
from outrider.models.loading.load import finish
from outrider.models.probes.probe import probe_logits

if TYPE_CHECKING:
    from transformers.pytorch_utils import Conv1D

    Linear: TypeAlias = nn.Linear | Conv1D | PackedLinear | PanelLinear | BlockLinear


def is_linear(layer: nn.Module) -> bool:
    """Whether this is a linear layer whose weight can be read. Subclasses may do more than
    multiply: not they."""
    return is_plain(layer) or type(layer) in (PackedLinear, PanelLinear, BlockLinear)


def linear_shape(layer: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, without touching its weights."""
    if is_transposed(layer):
        return layer.weight.shape[1], layer.weight.shape[0]
    return layer.out_features, layer.in_features


def weight_of(layer: Linear) -> Tensor:
    """The weight (out, in) of a linear layer, plain, packed, in panels or in blocks."""
    return (
        layer.weight
        if isinstance(layer, PackedLinear | PanelLinear | BlockLinear)
        else output_major(layer)
    )


def num_weights(module: nn.Module) -> int:
    """Numbers a pass through the module reads, however its linears are stored. A table of
    embeddings counts nothing: a pass looks up a few of its rows."""
    total = 0
    for part in module.modules():
        # stored padded, or as no parameter at all
        if isinstance(part, PackedLinear | PanelLinear | BlockLinear):
            total += part.out_features * part.in_features
        elif not isinstance(part, nn.Embedding):
            total += sum(parameter.numel() for parameter in part.parameters(recurse=False))
    return total


def with_replaced(module: nn.Module, replace: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """The module with `replace(part)` in the place of every part for which that is not None;
    `module` stays as it is.

    Parts without a replacement below them are shared. A part that stands in several places is
    replaced once.
    """
    replacements: dict[int, nn.Module] = {}

    def rebuilt(part: nn.Module) -> nn.Module:
        if id(part) not in replacements:
            duplicate = replace(part)
            replacements[id(part)] = (
                _with_children(part, rebuilt) if duplicate is None else duplicate
            )
        return replacements[id(part)]

    return rebuilt(module)


def _with_children(part: nn.Module, rebuilt: Callable[[nn.Module], nn.Module]) -> nn.Module:
    children = {
        name: None if child is None else rebuilt(child) for name, child in part._modules.items()
    }
    if all(children[name] is child for name, child in part._modules.items()):
        return part
    twin = copy.copy(part)  # another object with the same parameters, buffers and settings ...
    twin._modules = children  # ... and children of its own
    return twin


def derived_lm(module: nn.Module, target: LM, name: str) -> LM:
    """An `LM` around a module derived from the target's, with its own empty cache and measured pass
    limits.

    No check against the plain model: a draft that computes something else costs speed, not truth.
    Raises CapabilityError when its logits are no numbers, which would leave broken keys behind.
    """
    lm = plain_lm(module, target)
    finish(lm, module, pack=False)
    if not torch.isfinite(probe_logits(lm)).all():
        raise CapabilityError(
            f"{name} gives NaN or infinite logits, so it cannot draft. Use another drafter."
        )
    return lm


def plain_lm(module: nn.Module, target: LM) -> LM:
    """An `LM` around a module derived from the target's, with its own empty cache; its pass limits
    are not known."""
    shape = dataclasses.replace(target.shape, num_parameters=num_weights(module))
    return LM(module_run(module), shape, target.dtype, target.device)


def own_module(module: Any, drafter: str) -> Any:
    """The target's module. Raises CapabilityError when it was not kept while loading."""
    if module is None:
        raise CapabilityError(
            f"drafter '{drafter}' runs on the target's own weights, but the module was not kept "
            "when it was loaded"
        )
    return module
