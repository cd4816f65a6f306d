"""Recurrent layers in a recorded pass: transformers' functions for convolutions, delta rules and
Mamba, one event each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.families import RECORDED
from outrider.runtime.events import Event, Recorder, replaced

CONVOLUTION = "causal_conv1d_fn"
SCAN = "mamba2_chunk_scan"
SELECTIVE_SCAN = "mamba_selective_scan"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
GATED_NORM = "RMSNormGated"  # the end of such classes' names


@contextmanager
def recurrent_by_event(
    module: nn.Module, recorder: Recorder, rows: int, tokens: int
) -> Iterator[None]:
    """Inside, these functions write down that they were called with rows x tokens, and return
    tensors of the right shape."""
    with ExitStack() as stack:
        for home in {type(part).__module__ for part in module.modules()}:
            code = sys.modules[home]
            if hasattr(code, CONVOLUTION):
                _instead(stack, code, CONVOLUTION, partial(_convolution, recorder))
            if hasattr(code, SCAN):
                _instead(stack, code, SCAN, partial(_scan, recorder))
            if hasattr(code, SELECTIVE_SCAN):
                _instead(stack, code, SELECTIVE_SCAN, partial(_selective_scan, recorder))
            for name in DELTA_RULES:
                if hasattr(code, name):
                    _instead(stack, code, name, partial(_delta_rule, recorder))
        for part in module.modules():
            if type(part).__name__.endswith(GATED_NORM):
                stack.enter_context(
                    replaced(part, "forward", partial(_by_token, part.forward, (rows, tokens)))
                )
            elif isinstance(part, nn.Conv1d) and _is_causal(part):
                stack.enter_context(replaced(part, "forward", partial(_by_channel, recorder, part)))
            elif (function := RECORDED.get(type(part).__name__)) is not None:
                stack.enter_context(
                    replaced(
                        part, "forward", partial(function, part, partial(_decaying_sums, recorder))
                    )
                )
        yield


def _is_causal(layer: nn.Conv1d) -> bool:
    """Whether each channel goes by itself, padded so that the first outputs are those of the inputs
    up to them."""
    return (
        layer.groups == layer.in_channels == layer.out_channels
        and (layer.padding, layer.stride, layer.dilation)
        == ((layer.kernel_size[0] - 1,), (1,), (1,))
        and layer.padding_mode == "zeros"
    )


def _by_channel(recorder: Recorder, layer: nn.Conv1d, hidden_states: Tensor) -> Tensor:
    """(B, channels, T), without the outputs after the last token."""
    return _convolution(recorder, hidden_states, layer.weight.squeeze(1), layer.bias)


def _instead(stack: ExitStack, code: ModuleType, name: str, function: Callable[..., Any]) -> None:
    names = tuple(inspect.signature(getattr(code, name)).parameters)
    stack.enter_context(replaced(code, name, partial(_called_by_name, names, function)))


def _called_by_name(
    names: tuple[str, ...], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return function(**dict(zip(names, args, strict=False)), **kwargs)


def _convolution(
    recorder: Recorder,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **unused: object,
) -> Tensor:
    """A convolution (B, channels, T) of each channel by a weight (channels, width)."""
    with recorder.paused():
        out = hidden_states.clone()
    recorder.events.append(
        Event(
            "short_convolution", (hidden_states, weight, bias), {"activation": activation}, (out,)
        )
    )
    return out


def _delta_rule(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **unused: object,
) -> tuple[Tensor, None]:
    """(B, T, heads, value size), of the right shape; its numbers are never looked at."""
    with recorder.paused():
        out = value.clone()
    options = {"norms": use_qk_l2norm_in_kernel, "scale": query.shape[-1] ** -0.5}
    recorder.events.append(Event("delta_rule", (query, key, value, g, beta), options, (out,)))
    return out, None


def _scan(
    recorder: Recorder,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **unused: object,
) -> Tensor:
    """Mamba 2's outputs (B, T, heads, head size), fp32: a delta rule that corrects nothing, C its
    queries and B its keys."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.clamp(
        torch.nn.functional.softplus(dt) if dt_softplus else dt, min=dt_limit[0], max=dt_limit[1]
    )
    x = hidden_states.float()
    out = _decaying_sums(
        recorder, C.float(), B.float(), x * dt[..., None].float(), A.float() * dt.float()
    )
    return out if D is None else out + D[..., None] * x


def _decaying_sums(
    recorder: Recorder, query: Tensor, key: Tensor, value: Tensor, decay: Tensor
) -> Tensor:
    """Linear attention with decay: queries read states that take in keys times values; a delta rule
    that corrects nothing."""
    with recorder.paused():
        out = value.clone()
    recorder.events.append(
        Event("delta_rule", (query, key, value, decay), {"norms": False, "scale": 1.0}, (out,))
    )
    return out


def _selective_scan(
    recorder: Recorder,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **unused: object,
) -> Tensor:
    """Mamba 1's outputs (B, channels, T)."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = torch.nn.functional.softplus(dt) if delta_softplus else dt
    x, step, key, query = (tensor.transpose(1, 2) for tensor in (hidden_states, dt, B, C))
    value = x.float() * step.float()
    with recorder.paused():
        scanned = x.clone()
    recorder.events.append(Event("scan", (value, step, A, key, query), {}, (scanned,)))
    out = scanned.transpose(1, 2)
    out = out if D is None else out + D[:, None] * hidden_states
    return out if z is None else out * torch.nn.functional.silu(z)


def _by_token(
    forward: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, int],
    hidden_states: Tensor,
    gate: Tensor,
) -> Tensor:
    """The norm of numbers (rows * tokens * heads, size), token by token: some models put heads and
    tokens into one dimension."""
    if hidden_states.dim() != 2:
        return forward(hidden_states, gate)
    apart = (*shape, -1, hidden_states.shape[-1])
    return forward(hidden_states.view(apart), gate.view(apart)).reshape(hidden_states.shape)
