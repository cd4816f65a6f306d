"""One small pass of a model, written down operation by operation: what `lower.py` makes a program
of.

The model runs as it is, on a few real tokens, under a dispatch mode that sees every torch
operation: 20 us for each, so that a model of 30 layers takes a tenth of a second. Attention, the
products of experts, recurrences, rotary embeddings and layers that keep their weights in integers
are not entered: rotary results depend on positions alone and become tables, the others are
operations of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from outrider.lazy import transformers
from outrider.models.attention import NAME, without_mask
from outrider.models.gguf.linear import BlockEmbedding
from outrider.models.indexer import CHOOSE, Scores
from outrider.models.latent import ABSORBED, LatentProduct, absorbed
from outrider.models.signals import AFTER_NORM, Listening
from outrider.runtime.events import Event, Recorder, replaced
from outrider.runtime.experts import experts_by_event
from outrider.runtime.matrices import keeps_integers
from outrider.runtime.recurrent import recurrent_by_event
from outrider.runtime.rotary import real_tables

RECORDING = "outrider-recording"
# of the pass that is recorded
ROWS = 2
TOKENS = 5


@dataclass
class Recording:
    """A whole pass. Tensors are distinguished by identity, and all of them are kept alive."""

    ids: Tensor  # (ROWS, TOKENS)
    positions: Tensor
    events: list[Event] = field(default_factory=list)
    logits: Tensor | None = None
    signals: dict[int, Tensor] = field(default_factory=dict)
    # (ROWS, TOKENS, size) each, that are given with a pass
    inputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Layer:
    """The attributes that are read of an attention module."""

    layer_idx: int


class RecordedCache:
    """The cache of a part that is recorded: tensors are (B, heads, T, size), of keys and values (B,
    KV heads, T, size)."""

    def __init__(self, events: list[Event], recorder: Recorder) -> None:
        self._events = events
        self._recorder = recorder

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sees_all: bool = False,
        window: int = 0,
    ) -> Tensor:
        """(B, T, heads, size), of the right shape. `sees_all`: tokens see those of the pass that
        come after them, too. `window`: positions looked back, the token's own counts as one; 0:
        all."""
        own = _Layer(layer)
        return _attention(
            self._events,
            self._recorder,
            own,
            query,
            key,
            value,
            None,
            sees_all=sees_all,
            sliding_window=window or None,
        )[0]

    def attending(self, module: Any) -> AbstractContextManager[None]:
        """A module of transformers attends over this cache inside."""
        return attending(module, self._events, self._recorder)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keys and values that this pass does not attend to."""
        self._events.append(Event("store", (key, value), {"layer": layer}, ()))


# (ids, positions, inputs, cache) -> hidden states by key, what the head reads among them, and
# logits
Part = Callable[[Tensor, Tensor, list[Tensor], RecordedCache], tuple[dict[int, Tensor], Tensor]]


def record(module: Any, signals: tuple[int, ...]) -> Recording:
    """A pass of `module` and its hidden states of these keys. Raises CapabilityError where it has
    no such state."""
    device = next(module.parameters()).device
    ids = (
        torch.arange(ROWS * TOKENS, device=device).view(ROWS, TOKENS)
        % module.config.get_text_config().vocab_size
    )
    positions = torch.arange(TOKENS, device=device).expand(ROWS, -1).contiguous()
    recording = Recording(ids, positions)
    recorder = Recorder(recording.events)
    with (
        attending(module, recording.events, recorder),
        _written_down(module, recorder),
        ExitStack() as stack,
    ):
        if signals:
            stack.enter_context(Listening(module, signals).during(recording.signals))
        stack.enter_context(recorder)
        recording.logits = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    return recording


@contextmanager
def attending(module: Any, events: list[Event], recorder: Recorder) -> Iterator[None]:
    """Attention and choices of a module of transformers are written down inside; then it attends by
    our functions."""
    ABSORBED.add(RECORDING)
    CHOOSE[RECORDING] = partial(_choice, events, recorder)
    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[RECORDING] = absorbed(
        partial(_attention, events, recorder)
    )
    transformers.AttentionMaskInterface.register(RECORDING, without_mask)
    try:
        module.set_attn_implementation(RECORDING)
        yield
    finally:
        module.set_attn_implementation(NAME)
        # or what was recorded, weights and all, would stay
        del transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[RECORDING], CHOOSE[RECORDING]


@contextmanager
def _written_down(module: Any, recorder: Recorder) -> Iterator[None]:
    """Parts of the module that are one event each are so inside."""
    with ExitStack() as stack:
        for path, part in module.named_modules():
            if is_rotary(part):
                stack.enter_context(
                    replaced(
                        part,
                        "forward",
                        partial(_rotary, path, part.forward, recorder.events, recorder),
                    )
                )
            elif isinstance(part, BlockEmbedding):
                stack.enter_context(
                    replaced(part, "rows", partial(_rows, path, part, recorder.events, recorder))
                )
            elif isinstance(part, LatentProduct):
                for half in ("to_latent", "from_latent"):
                    stack.enter_context(
                        replaced(part, half, partial(_heads, part, half, recorder.events, recorder))
                    )
            elif keeps_integers(part):
                stack.enter_context(
                    replaced(
                        part, "forward", partial(_matrix, path, part, recorder.events, recorder)
                    )
                )
            elif (
                getattr(part, "layer_idx", 0) in (None, -1)
                and "layer_idx" in signature(part.forward).parameters
            ):
                stack.enter_context(
                    replaced(part, "forward", partial(_shared_by_layers, part, part.forward))
                )
        stack.enter_context(experts_by_event(module, recorder))
        stack.enter_context(recurrent_by_event(module, recorder, ROWS, TOKENS))
        # in it operations that are made of others would stay whole
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def record_part(
    module: nn.Module, num_ids: int, inputs: Sequence[tuple[int, torch.dtype]], forward: Part
) -> Recording:
    """Record a part of a model in a pass: token ids below `num_ids`, and inputs of these sizes and
    types for each token.

    `forward` calls it with ids, positions, inputs, and what stands for its cache.
    """
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % num_ids
    positions = torch.arange(TOKENS).expand(ROWS, -1).contiguous()
    recording = Recording(
        ids,
        positions,
        inputs=[torch.zeros(ROWS, TOKENS, size, dtype=dtype) for size, dtype in inputs],
    )
    recorder = Recorder(recording.events)
    with _written_down(module, recorder), recorder:
        cache = RecordedCache(recording.events, recorder)
        recording.signals, recording.logits = forward(
            recording.ids, recording.positions, recording.inputs, cache
        )
    return recording


def signals_of(num_layers: int) -> tuple[int, ...]:
    """Keys of all hidden states that a pass can give."""
    return (AFTER_NORM, *range(num_layers + 1))


def is_rotary(part: nn.Module) -> bool:
    """Whether a module makes cosines and sines of positions, as transformers' `...RotaryEmbedding`
    do."""
    return type(part).__name__.endswith("RotaryEmbedding")


def _attention(
    events: list[Event],
    recorder: Recorder,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sees_all: bool = False,
    values_in_keys: bool = False,
    indices: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """(B, T, heads, value size), of the right shape; its numbers are never looked at."""
    with recorder.paused():
        out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    kwargs = {
        "layer": module.layer_idx,
        "scaling": scaling,
        "softcap": softcap,
        "window": sliding_window,
        "sees_all": sees_all,
        "sinks": s_aux,
        "slopes": alibi_slopes,
        "values_in_keys": values_in_keys,
        "chosen": indices,
    }
    events.append(Event("attention", (query, key, value), kwargs, (out,)))
    return out, None


def _choice(events: list[Event], recorder: Recorder, number: int, scores: Scores) -> Tensor:
    """(B, T, count), likewise."""
    with recorder.paused():
        out = torch.zeros(*scores.key.shape[:2], scores.count, dtype=torch.int64)
    kwargs = {"layer": number, "scale": scores.scale, "count": scores.count}
    events.append(Event("choice", (scores.query, scores.key, scores.weights), kwargs, (out,)))
    return out


def _shared_by_layers(part: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention that several layers call by their numbers has the caller's."""
    number = signature(forward).bind(*args, **kwargs).arguments["layer_idx"]
    with replaced(part, "layer_idx", number):
        return forward(*args, **kwargs)


def _rotary(
    path: str,
    forward: Callable[..., Any],
    events: list[Event],
    recorder: Recorder,
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with recorder.paused():
        out = forward(x, position_ids, *args, **kwargs)
        tables = real_tables(out)
    events.append(Event("rotary", (path, x, position_ids, *args), kwargs, tables))
    if isinstance(out, Tensor) and out.is_complex():
        return torch.view_as_complex(tables[0].unflatten(-1, (-1, 2)))
    return out


def _matrix(path: str, layer: Any, events: list[Event], recorder: Recorder, x: Tensor) -> Tensor:
    """(..., out), of the right shape; its numbers are never looked at."""
    with recorder.paused():
        out = x.new_zeros(*x.shape[:-1], layer.out_features)
    events.append(Event("matrix", (path, layer, x), {}, (out,)))
    return out


def _heads(
    part: LatentProduct, half: str, events: list[Event], recorder: Recorder, x: Tensor
) -> Tensor:
    """(B, T, heads, out), likewise."""
    with recorder.paused():
        out = getattr(type(part), half)(part, x)
    events.append(Event("heads", (part, x), {"half": half}, (out,)))
    return out


def _rows(
    path: str, layer: BlockEmbedding, events: list[Event], recorder: Recorder, tokens: Tensor
) -> Tensor:
    """(..., in), likewise."""
    with recorder.paused():
        out = torch.zeros(*tokens.shape, layer.inputs, dtype=layer.dtype)
    events.append(Event("rows", (path, layer, tokens), {}, (out,)))
    return out
