"""Recurrent layers in a recorded pass: transformers' functions for convolutions, delta rules and Mamba, one event each."""

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

from outrider.runtime.events import Event, Recorder, replaced

CONVOLUTION = "causal_conv1d_fn"
SCAN = "mamba2_chunk_scan"
SELECTIVE_SCAN = "mamba_selective_scan"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
GATED_NORM = "RMSNormGated"  # the end of such classes' names


@contextmanager
def recurrent_by_event(module: nn.Module, recorder: Recorder, rows: int, tokens: int) -> Iterator[None]:
    """Inside, these functions write down that they were called with rows x tokens, and return tensors of the right shape."""
    with ExitStack() as stack:
        for home in {type(part).__module__ for part in module.modules()}:
            code = sys.modules[home]
            if hasattr(code, CONVOLUTION):
                _instead(stack, code, CONVOLUTION, partial(_convolution, recorder))
            if hasattr(code, SCAN):
                _instead(stack, code, SCAN, partial(_scan, recorder))
            if hasattr(code, SELECTIVE_SCAN):
                _instead(stack, code, SELECTIVE_SCAN, partial(selective_scan, recorder))
            for name in DELTA_RULES:
                if hasattr(code, name):
                    _instead(stack, code, name, partial(_delta_rule, recorder))
        for part in module.modules():
            if type(part).__name__.endswith(GATED_NORM):
                stack.enter_context(replaced(part, "forward", partial(_by_token, part.forward, (rows, tokens))))
        yield


def _instead(stack: ExitStack, code: ModuleType, name: str, function: Callable[..., Any]) -> None:
    names = tuple(inspect.signature(getattr(code, name)).parameters)
    stack.enter_context(replaced(code, name, partial(_called_by_name, names, function)))


def _called_by_name(names: tuple[str, ...], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(**dict(zip(names, args, strict=False)), **kwargs)


def _convolution(
    recorder: Recorder, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    **unused: object,
) -> Tensor:  # fmt: skip
    """(B, channels, T), as it came."""
    return convolved(recorder, hidden_states, weight, bias, activation)


def convolved(
    recorder: Recorder, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None
) -> Tensor:
    """A convolution (B, channels, T) of each channel by a weight (channels, width), one event."""
    with recorder.paused():
        out = hidden_states.clone()
    recorder.events.append(Event("short_convolution", (hidden_states, weight, bias), {"activation": activation}, (out,)))
    return out


def _delta_rule(
    recorder: Recorder, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **unused: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """(B, T, heads, value size), of the right shape; its numbers are never looked at."""
    with recorder.paused():
        out = value.clone()
    options = {"norms": use_qk_l2norm_in_kernel, "scale": query.shape[-1] ** -0.5}
    recorder.events.append(Event("delta_rule", (query, key, value, g, beta), options, (out,)))
    return out, None


def _scan(
    recorder: Recorder, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    **unused: object,
) -> Tensor:  # fmt: skip
    """Mamba 2's outputs (B, T, heads, head size), fp32: a delta rule that corrects nothing, C its queries and B its keys."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.clamp(torch.nn.functional.softplus(dt) if dt_softplus else dt, min=dt_limit[0], max=dt_limit[1])
    x = hidden_states.float()
    query, key, value, decay = C.float(), B.float(), x * dt[..., None].float(), A.float() * dt.float()
    with recorder.paused():
        out = value.clone()
    recorder.events.append(Event("delta_rule", (query, key, value, decay), {"norms": False, "scale": 1.0}, (out,)))
    return out if D is None else out + D[..., None] * x


def selective_scan(
    recorder: Recorder, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **unused: object,
) -> Tensor:  # fmt: skip
    """Mamba 1's outputs (B, channels, T)."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = torch.nn.functional.softplus(dt) if delta_softplus else dt
    x, step, key, query = (one.transpose(1, 2) for one in (hidden_states, dt, B, C))
    value = x.float() * step.float()
    with recorder.paused():
        scanned = x.clone()
    recorder.events.append(Event("scan", (value, step, A, key, query), {}, (scanned,)))
    out = scanned.transpose(1, 2)
    out = out if D is None else out + D[:, None] * hidden_states
    return out if z is None else out * torch.nn.functional.silu(z)


def _by_token(forward: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, int], hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The norm of numbers (rows * tokens * heads, size), token by token: some models put heads and tokens into one dimension."""
    if hidden_states.dim() != 2:
        return forward(hidden_states, gate)
    apart = (*shape, -1, hidden_states.shape[-1])
    return forward(hidden_states.view(apart), gate.view(apart)).reshape(hidden_states.shape)
