"""Recurrent layers whose own code loops over tokens: in a recorded pass they call recurrences that are one event each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runtime.events import Event, Recorder, replaced
from outrider.runtime.recurrent import convolved, selective_scan

Layer = Any  # of transformers


@contextmanager
def looping_layers_by_event(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, such layers of `module` run as the functions below say."""
    with ExitStack() as stack:
        for part in module.modules():
            for end, (method, function) in BY_CLASS.items():
                if type(part).__name__.endswith(end):
                    stack.enter_context(replaced(part, method, partial(function, recorder, part)))
            if isinstance(part, nn.Conv1d) and _is_causal(part):
                stack.enter_context(replaced(part, "forward", partial(_convolution, recorder, part)))
        yield


def _is_causal(layer: nn.Conv1d) -> bool:
    """Whether each channel goes by itself, padded so that the first outputs are those of the inputs up to them."""
    return (
        layer.groups == layer.in_channels == layer.out_channels
        and (layer.padding, layer.stride, layer.dilation) == ((layer.kernel_size[0] - 1,), (1,), (1,))
        and layer.padding_mode == "zeros"
    )


def _convolution(recorder: Recorder, layer: Layer, hidden_states: Tensor) -> Tensor:
    """(B, channels, T), without the outputs behind the last token."""
    return convolved(recorder, hidden_states, layer.weight.squeeze(1), layer.bias)


def _gated(
    recorder: Recorder, layer: Layer, hidden_states: Tensor, recurrent_gate: Tensor, **unused: object
) -> tuple[Tensor, None]:
    """RG-LRU's recurrence (B, T, channels): gates are the factors of decays. A state begins as 0, so that no gate need be 0."""
    with recorder.paused():
        out = hidden_states.clone()
    recorder.events.append(Event("scan", (hidden_states, recurrent_gate, None), {}, (out,)))
    return out, None


def _lightning(recorder: Recorder, layer: Layer, hidden_states: Tensor, *unused: object, **also: object) -> tuple[Tensor, None]:
    """Lightning attention: a delta rule that corrects nothing, each head's states decaying at a rate of its own."""
    heads = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (layer.num_attention_heads, -1))
    query, key, value = heads.split(layer.head_dim, dim=3)
    decay = torch.zeros_like(query[..., 0], dtype=torch.float32) - layer.slope_rate[:, 0, 0].float()
    with recorder.paused():
        out = value.clone()
    recorder.events.append(Event("delta_rule", (query, key, value, decay), {"norms": False, "scale": 1.0}, (out,)))
    normed = layer.norm(out.reshape(*hidden_states.shape[:2], -1))
    return layer.out_proj(functional.sigmoid(layer.output_gate(hidden_states)) * normed), None


def _scans_of_heads(recorder: Recorder, layer: Layer, hidden_states: Tensor, *unused: object, **also: object) -> Tensor:
    """Zamba's mixer: a selective scan for each head, with projections of its own."""
    both = layer.in_proj(hidden_states).unflatten(-1, (-1, 2))
    convolution = layer.conv1d
    x = convolved(recorder, both[..., 0].transpose(1, 2), convolution.weight.squeeze(1), convolution.bias, layer.activation)
    states, gates = x.transpose(1, 2), both[..., 1]
    found = []
    for head in range(layer.n_mamba_heads):
        part = slice(head * layer.mamba_head_dim, (head + 1) * layer.mamba_head_dim)
        own, gate = states[..., part], gates[..., part]
        sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
        step, key, query = functional.linear(own, layer.x_proj_weight[head]).split(sizes, dim=-1)
        step = functional.linear(step, layer.dt_proj_weight[head])
        x, dt, B, C, z = (one.transpose(1, 2) for one in (own, step, key, query, gate))
        A, D = -torch.exp(layer.A_log[head].float()), layer.D[head].float()
        bias = layer.dt_proj_bias[head].float()
        found.append(selective_scan(recorder, x, dt, A, B, C, D=D, z=z, delta_bias=bias, delta_softplus=True))
    return layer.out_proj(torch.cat(found, dim=1).transpose(1, 2).to(hidden_states.dtype))


# by the end of a class's name: the method in whose place another function runs
BY_CLASS: dict[str, tuple[str, Callable[..., Any]]] = {
    "LightningAttention": ("forward", _lightning), "Rglru": ("_rnn_scan", _gated),
    "ZambaMambaMixer": ("forward", _scans_of_heads),
}  # fmt: skip
