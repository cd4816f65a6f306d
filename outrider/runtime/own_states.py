"""Models with running states on our runtimes: their states move from transformers' cache to ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.kv import LayerShape
from outrider.lazy import transformers
from outrider.models.lm import LM, Run
from outrider.models.probes.probe import check_same_logits, own_logits, probe_tokens
from outrider.models.stateful.lm import StateLM
from outrider.runtime import library
from outrider.runtime.blocks import DTYPES, NotLoweredError
from outrider.runtime.checked import one_thread
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code, Program
from outrider.runtime.run import NativeRun
from outrider.runtime.windows import kept_layers

NO_KEYS = LayerShape(0, 0, 0)  # of a layer that keeps a running state, or nothing
# in transformers' cache
RECURRENT_LAYERS = {"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"}
LAYERS_OF_KEYS = ("DynamicLayer", "DynamicSlidingWindowLayer")
LAYERS_OF_NOTHING = ("DummyLayer",)  # an MLP or experts alone: Nemotron-H


def native_states(lm: StateLM, module: Any, cache: Path) -> LM:
    """The model of `lm` on the executor, with its states in our cache. Raises CapabilityError where
    that cannot be; `lm` still runs then."""
    if lm.device.type != "cpu" or lm.dtype not in DTYPES:
        dtype = str(lm.dtype).removeprefix("torch.")
        raise NotLoweredError(
            f"the native runtime runs bfloat16 and float32 on a CPU, not {dtype} on "
            f"{lm.device.type}"
        )
    path = library.find(cache)

    def run(made: LM, program: Program) -> NativeRun:
        if program.matrices and lm.dtype != torch.bfloat16:
            raise NotLoweredError(
                "weights kept in integers are multiplied in bfloat16 alone, with activations "
                "rounded to 8 bits"
            )
        return NativeRun(made, module, program, path)

    states_lm = moved_states(lm, module, run)
    assert isinstance(states_lm.run, NativeRun)
    states_lm.kernels = states_lm.run.executor.library
    return states_lm


def moved_states(lm: StateLM, module: Any, make_run: Callable[[LM, Program], Run]) -> LM:
    """The model of `lm` with its states in our cache, its passes those of `make_run`. Raises
    CapabilityError where that cannot be; `lm` still runs then."""
    _refuse_other_layers(module)
    own_attention = module.config._attn_implementation
    with one_thread(lm.shape.num_parameters):
        try:
            expected = own_logits(
                module, lm.name, lm.dtype, probe_tokens(lm.shape.vocab_size, 12, lm.device)
            )
            program = lower(module)
        except (OutriderError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # foreign code: whatever it raises is reported
            raise NotLoweredError(
                f"its code fails when a pass is recorded ({type(error).__name__}: {error})"
            ) from error
        finally:
            module.set_attn_implementation(own_attention)
    layers = kept_layers(_layers(program, len(lm.shape.layers)), program, lm.shape.context_length)
    made = LM(
        lm.run, replace(lm.shape, layers=layers, states=tuple(program.states)), lm.dtype, lm.device
    )
    made.run = make_run(made, program)
    check_same_logits(
        made, expected, module, picks_experts=any(op.code == Code.EXPERTS for op in program.body)
    )
    return made


def _refuse_other_layers(module: Any) -> None:
    """Raises NotLoweredError for layers whose contents only longer texts would show: picked keys,
    compressed ones."""
    config = module.config.get_text_config(decoder=True)
    try:
        layers = transformers.DynamicCache(config=config).layers
    except Exception as error:  # foreign code: whatever it raises is reported
        raise NotLoweredError(f"its config describes no cache ({type(error).__name__})") from error
    kinds = {type(layer).__name__ for layer in layers}
    others = sorted(kinds - {*RECURRENT_LAYERS, *LAYERS_OF_KEYS, *LAYERS_OF_NOTHING})
    others = others or ["an indexer"] * bool(getattr(config, "index_topk", None))
    if others:
        raise NotLoweredError(f"it keeps other things of a text ({', '.join(others)})")
    if not RECURRENT_LAYERS & kinds:
        raise NotLoweredError("no layer keeps a running state")


def _layers(program: Program, num_layers: int) -> tuple[LayerShape, ...]:
    """Heads and sizes of keys and values, by what the program stores. Raises NotLoweredError for a
    layer without any state."""
    shapes: list[LayerShape] = [NO_KEYS] * num_layers
    stored: set[tuple[int, bool]] = set()
    sizes: dict[int, int] = {}
    for op in program.body:
        if op.code == Code.ATTENTION and op.output is not None:
            sizes[op.layer] = op.output.cols
        if op.code == Code.STORE:
            if not 0 <= op.layer < num_layers or (op.layer, op.is_value) in stored:
                raise NotLoweredError(
                    "an attention layer that stands in several places and has no number"
                )
            stored.add((op.layer, op.is_value))
            heads = op.inputs[0].rows
            size = op.inputs[0].cols
            before = shapes[op.layer]
            shapes[op.layer] = (
                replace(before, num_kv_heads=heads, value_size=size)
                if op.is_value
                else replace(before, num_kv_heads=heads, key_size=size)
            )
    for layer, size in sizes.items():
        if (layer, True) not in stored:
            shapes[layer] = replace(shapes[layer], value_size=size, values_in_keys=True)
    if not program.states:
        raise NotLoweredError("no operation that keeps a running state was found")
    return tuple(shapes)
