"""A pass of transformers' module over one text, on the cache that the module makes for itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.models.probes.reference import takes_positions
from outrider.models.signals import Listening
from outrider.models.stateful.state import OwnState

# what models call their cache, as an argument and in their output
NAMES = ("past_key_values", "cache_params", "state")


class OwnCacheRun:
    """Passes of a model on transformers' own cache, one text at a time."""

    def __init__(self, module: Any) -> None:
        self.module = module
        takes = inspect.signature(module.forward).parameters
        self._argument = next((name for name in NAMES if name in takes), None)
        self._keeps_columns = "logits_to_keep" in takes
        self._listening: dict[tuple[int, ...], Listening] = {}

    @cached_property
    def _takes_positions(self) -> bool:
        return takes_positions(self.module)

    def feed(
        self,
        state: OwnState | None,
        start: int,
        tokens: Sequence[int],
        columns: Tensor,
        layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, list[Tensor], OwnState]:
        """Logits (1, K, V) of these columns, hidden states (1, T, H) of these layers, and the state
        after the pass.

        `tokens` stand at positions start, start + 1, ...; `state`, of the tokens before them, is
        changed, None for none. Raises CapabilityError for a model without a cache.
        """
        device = next(self.module.parameters()).device
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([list(tokens)], device=device),
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = torch.arange(start, start + len(tokens), device=device)[None]
        if self._keeps_columns:
            inputs["logits_to_keep"] = columns
        if state is not None and self._argument is not None:
            inputs[self._argument] = state.cache
        output, hidden = self._pass(inputs, layers)
        cache = next(
            (cache for name in NAMES if (cache := getattr(output, name, None)) is not None), None
        )
        if cache is None:
            raise CapabilityError(
                f"{type(self.module).__name__} in transformers keeps no cache of a text"
            )
        logits = output.logits if self._keeps_columns else output.logits[:, columns]
        return logits, hidden, OwnState(cache)

    def _pass(self, inputs: dict[str, Any], layers: tuple[int, ...]) -> tuple[Any, list[Tensor]]:
        count = inputs["input_ids"].shape[1]
        call = partial(self.module, **inputs)
        states: dict[int, Tensor] = {}
        try:
            if not layers:
                return call(), []
            if layers not in self._listening:
                self._listening[layers] = Listening(self.module, layers)
            with self._listening[layers].during(states):
                output = call()
        except (CapabilityError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a longer text than those that were tried
            code = type(self.module).__name__
            what = f"fails in a pass over {count} tokens ({message(error)})"
            raise CapabilityError(f"the code of {code} in transformers {what}") from error
        return output, [states[layer] for layer in layers]


def message(error: Exception) -> str:
    """An exception in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, CapabilityError) else f"{type(error).__name__}: {first}"
