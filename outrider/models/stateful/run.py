"""A pass of transformers' module over one text, on the cache that the module makes for itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.lazy import transformers
from outrider.models.probes.reference import next_logits, takes_positions
from outrider.models.signals import Listening
from outrider.models.stateful.state import HeldTensor, OwnState

NAMES = ("past_key_values", "cache_params", "state")  # what models call their cache, as an argument and in their output


class OwnCacheRun:
    """Passes of a model on transformers' own cache, one text at a time.

    `held`: see `find_held`. `keeps_state` False: the model has no cache, so every pass begins where the text does.
    """

    def __init__(self, module: Any, held: Mapping[HeldTensor, Tensor | None], *, keeps_state: bool = True) -> None:
        self.module = module
        self.keeps_state = keeps_state
        takes = inspect.signature(module.forward).parameters
        self._argument = next((name for name in NAMES if name in takes), None)
        self._takes_positions = takes_positions(module)
        self._keeps_columns = "logits_to_keep" in takes
        self._held = dict(held) if keeps_state else {}
        self._listening: dict[tuple[int, ...], Listening] = {}

    def feed(
        self, state: OwnState | None, start: int, tokens: Sequence[int], columns: Tensor, layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor], OwnState | None]:
        """Logits (1, K, V) of these columns, hidden states (1, T, H) of these layers, and the state behind the pass.

        `tokens` stand at positions start, start + 1, ...; `state`, of the tokens before them, is changed, None for none.
        """
        device = next(self.module.parameters()).device
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(tokens)], device=device), "use_cache": self.keeps_state}
        if self._takes_positions:
            inputs["position_ids"] = torch.arange(start, start + len(tokens), device=device)[None]
        if self._keeps_columns:
            inputs["logits_to_keep"] = columns
        if self.keeps_state:
            state = OwnState(None, dict(self._held)) if state is None else state
            _put_held(state.held)
            if state.cache is None and self._argument == "past_key_values" and self._held:  # its output does not have the cache
                config = self.module.config.get_text_config(decoder=True)
                state.cache = transformers.DynamicCache(config=config)
            if state.cache is not None and self._argument is not None:
                inputs[self._argument] = state.cache
        output, hidden = self._pass(inputs, layers)
        if state is not None and self.keeps_state:
            state.cache = _cache_of(output, state.cache)
            state.held = {held_tensor: getattr(*held_tensor) for held_tensor in self._held}
        logits = output.logits if self._keeps_columns else output.logits[:, columns]
        return logits, hidden, state

    def _pass(self, inputs: dict[str, Any], layers: tuple[int, ...]) -> tuple[Any, list[Tensor]]:
        count, call = inputs["input_ids"].shape[1], partial(self.module, **inputs)
        if not layers:
            return self.guarded(count, call), []
        if layers not in self._listening:
            self._listening[layers] = Listening(self.module, layers)
        states: dict[int, Tensor] = {}
        with self._listening[layers].during(states):
            output = self.guarded(count, call)
        return output, [states[layer] for layer in layers]

    def guarded(self, count: int, call: Callable[[], Any]) -> Any:
        """What a pass over so many tokens gives.

        Raises CapabilityError for code that fails with this text, though it did not with the ones that were tried before.
        """
        try:
            return call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            code = type(self.module).__name__
            what = f"fails in a pass over {count} tokens ({message(error)})"
            raise CapabilityError(f"the code of {code} in transformers {what}") from error


class AnewRun(OwnCacheRun):
    """Passes of a model without a cache that tell one token each: `generate`'s passes over the whole text, for each token.

    The model only has to write with `generate`. It may read a text in both directions (CPM-Ant), or a mask behind it (XLM).
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module, {}, keeps_state=False)

    def feed(
        self, state: OwnState | None, start: int, tokens: Sequence[int], columns: Tensor, layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor], None]:
        """Logits (1, K, V) of these columns. Raises CapabilityError where hidden states are asked for."""
        if layers:
            code = type(self.module).__name__
            raise CapabilityError(f"a pass of {code} tells one token, so none has the hidden states of a whole text")
        ends = [column + 1 for column in columns.tolist()]
        return torch.stack([self.guarded(end, partial(next_logits, self.module, tokens[:end])) for end in ends], dim=1), [], None


def message(error: Exception) -> str:
    """An exception in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, CapabilityError) else f"{type(error).__name__}: {first}"


@torch.inference_mode()
def find_held(module: Any) -> dict[HeldTensor, Tensor | None]:
    """Attributes of modules that hold another tensor after each pass, with what they hold before the first one.

    Such a state is in no cache (RecurrentGemma's). The module must not have made a pass with a cache before.
    """
    before = _tensor_attributes(module)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device)
    try:
        module(input_ids=ids, use_cache=True)
        first = _tensor_attributes(module)
        module(input_ids=ids, use_cache=True)
    except Exception:  # noqa: BLE001  foreign code: feeding it will tell
        return {}
    changed = [held_tensor for held_tensor, tensor in _tensor_attributes(module).items() if first.get(held_tensor) is not tensor]
    found = {held_tensor: before.get(held_tensor) for held_tensor in changed}
    _put_held(found)
    return found


def _put_held(held: dict[HeldTensor, Tensor | None]) -> None:
    for (module, name), tensor in held.items():
        setattr(module, name, tensor)


def _tensor_attributes(module: nn.Module) -> dict[HeldTensor, Tensor]:
    """Plain attributes of all modules (no parameters, no buffers) that are tensors."""
    return {(part, name): value for part in module.modules() for name, value in vars(part).items() if isinstance(value, Tensor)}


def _cache_of(output: Any, given: Any) -> Any:
    """The cache in a model's output, else the one it was given.

    MiniMax's cache asks its first layer how long the text is; where that layer has no keys, it is changed to ask the next.
    """
    found = next((cache for name in NAMES if (cache := getattr(output, name, None)) is not None), given)
    if hasattr(found, "linear_cache"):
        for index, layer in enumerate(found.layers):
            if isinstance(layer, transformers.cache_utils.DynamicLayer) and layer.keys is None:
                found.layers[index] = transformers.cache_utils.LinearAttentionLayer()
    return found
