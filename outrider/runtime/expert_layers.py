"""Mixtures of experts outside transformers' common interface: in a recorded pass their products are one event each, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runtime.events import Recorder, replaced
from outrider.runtime.experts import product

Layer = Any  # of transformers
Product = Callable[..., Tensor]  # (x, the experts' numbers, a module with weights, the weights' name) -> what these experts give
Choice = tuple[Tensor, Tensor]  # numbers of the chosen experts, and their weights (tokens, k)


@contextmanager
def other_experts_by_event(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, such layers of `module` run as the functions below say."""
    with ExitStack() as stack:
        paths = {id(part): path for path, part in module.named_modules()}

        def chosen(x: Tensor, index: Tensor, owner: Layer, name: str, *, transposed: bool = False) -> Tensor:
            path = f"{paths[id(owner)]}.{name}"
            return product(recorder, x, index, getattr(owner, name), None, path=path, transposed=transposed)

        for part in module.modules():
            for method, function in BY_CLASS.get(type(part).__name__, {}).items():
                stack.enter_context(replaced(part, method, partial(function, chosen, part)))
            if type(part).__name__ == "Llama4TextAttention":  # 1 as far as our attention reaches, by positions of the pass alone
                stack.enter_context(replaced(part, "attn_temperature_tuning", False))
        yield


def _llama4(chosen: Product, layer: Layer, hidden_states: Tensor) -> tuple[Tensor, None]:
    """Experts that are given their share of the input."""
    x, experts = hidden_states.reshape(-1, layer.hidden_dim), layer.experts
    scores, index = functional.linear(x, layer.router.weight).topk(layer.top_k, dim=1)
    shares = torch.sigmoid(scores.float()).to(x.dtype)
    gate, up = chosen(x[:, None] * shares[..., None], index, experts, "gate_up_proj", transposed=True).chunk(2, dim=-1)
    found = chosen(up * experts.act_fn(gate), index, experts, "down_proj", transposed=True)
    return layer.shared_expert(x) + found.sum(dim=1), None


def _gemma4_router(chosen: Product, layer: Layer, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gemma 4's choice of experts, whose shares are scaled by a number of each expert."""
    x = layer.norm(hidden_states) * layer.scale * layer.scalar_root_size
    scores = torch.softmax(layer.proj(x), dim=-1, dtype=torch.float32)
    shares, index = scores.topk(layer.config.top_k_experts, dim=-1)
    scales = (scores * 0 + layer.per_expert_scale).gather(1, index)
    return scores, shares / shares.sum(dim=-1, keepdim=True) * scales, index


def _longcat(chosen: Product, layer: Layer, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts of which those beyond the last one with weights give what they are given."""
    number = top_k_index.float()
    index = number.clamp(max=layer.num_routed_experts - 1)
    gate, up = chosen(hidden_states, index, layer, "gate_up_proj").chunk(2, dim=-1)
    found = chosen(layer.act_fn(gate) * up, index, layer, "down_proj")
    if layer.zero_expert_num:
        is_own = (number >= layer.num_routed_experts)[..., None]
        found = torch.where(is_own, hidden_states[:, None].expand_as(found), found)
    return (found * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _gated(layer: Layer, x: Tensor) -> Choice:
    """JetMoE's choice of experts."""
    logits, index = layer.router.layer(x).float().topk(layer.router.top_k, dim=1)
    return index, torch.softmax(logits, dim=1).type_as(x)


def _jetmoe(chosen: Product, layer: Layer, layer_input: Tensor) -> Tensor:
    x = layer_input.reshape(-1, layer.input_size)
    index, shares = _gated(layer, x)
    gate, up = chosen(x, index, layer.input_linear, "weight").chunk(2, dim=-1)
    found = chosen(layer.activation(gate) * up, index, layer.output_linear, "weight")
    return (found * shares[..., None]).sum(dim=1).view(layer_input.shape) + layer.bias


def _queries_of_experts(chosen: Product, layer: Layer, layer_input: Tensor) -> tuple[Tensor, None, Choice]:
    """JetMoE's queries (B, T, k, size): a projection for each expert that a token chooses."""
    x = layer_input.reshape(-1, layer.input_size)
    index, shares = _gated(layer, x)
    return chosen(x, index, layer.input_linear, "weight").view(*layer_input.shape[:2], layer.top_k, -1), None, (index, shares)


def _output_of_experts(chosen: Product, layer: Layer, layer_input: Tensor, choice: Choice) -> Tensor:
    """What these experts make of attention's results (B, T, k, size)."""
    index, shares = choice
    found = chosen(layer_input.reshape(-1, *layer_input.shape[2:]), index, layer.output_linear, "weight")
    return (found * shares[..., None]).sum(dim=1).view(*layer_input.shape[:2], -1) + layer.bias


# by class: the functions that run in the place of its methods
BY_CLASS: dict[str, dict[str, Callable[..., Any]]] = {
    "Gemma4TextRouter": {"forward": _gemma4_router},
    "Llama4TextMoe": {"forward": _llama4},
    "LongcatFlashExperts": {"forward": _longcat},
    "JetMoeMoE": {"forward": _jetmoe},
    "JetMoeMoA": {"map": _queries_of_experts, "reduce": _output_of_experts},
}
