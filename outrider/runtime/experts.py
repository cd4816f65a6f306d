"""Mixtures of experts in a recorded pass: transformers' common interface for them, with a function
of ours after it.

A router's choice is recorded operation by operation, and so are the gate and the sum of what the
chosen experts give. Only their products are not: each token multiplies with other weights, which is
one operation of the native runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from outrider.lazy import transformers
from outrider.models.gguf.linear import BlockExperts
from outrider.runtime.events import Event, Recorder

RECORDING = "outrider-recording"


@contextmanager
def experts_by_event(module: Any, recorder: Recorder) -> Iterator[None]:
    """Experts' products are one event each while this lasts."""
    transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS[RECORDING] = partial(
        _forward, recorder, {id(part): path for path, part in module.named_modules()}
    )
    configs = {
        id(part.config): part.config for part in module.modules() if hasattr(part, "has_gate")
    }
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = RECORDING
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]
        # or what was recorded would stay
        del transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS[RECORDING]


def _forward(
    recorder: Recorder,
    paths: Mapping[int, str],
    part: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """(tokens, hidden size), as transformers' `batched_mm` gives it, summed in the order of the
    choice."""

    def multiplied(x: Tensor, name: str) -> Tensor:
        """(tokens, k, out): each token with the weights of the experts that it chose."""
        weight = getattr(part, name)
        bias = getattr(part, f"{name}_bias") if part.has_bias else None
        with recorder.paused():
            in_blocks = isinstance(weight, BlockExperts)
            outputs = weight.outputs if in_blocks else weight.shape[2 if part.is_transposed else 1]
            out = x.new_zeros(*top_k_index.shape, outputs)
        options = {"transposed": part.is_transposed, "path": f"{paths[id(part)]}.{name}"}
        recorder.events.append(Event("experts", (x, top_k_index, weight, bias), options, (out,)))
        return out

    inner = (
        part._apply_gate(multiplied(hidden_states, "gate_up_proj"))
        if part.has_gate
        else part.act_fn(multiplied(hidden_states, "up_proj"))
    )
    output = multiplied(inner, "down_proj")
    if getattr(part, "has_post_expert_norm", False):
        output = part.post_expert_norm(output)
    return (output * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)
