"""The state of one text in a transformers model: its cache object."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.lazy import transformers

# what these layers only ever replace by longer tensors, or a window of them
GROWING = ("keys", "values")
# packages, or a checkpoint's own code, whose cache objects are copied
HOMES = ("transformers", "transformers_modules")


@dataclass
class OwnState:
    """The contents of transformers' cache for one text."""

    cache: Any

    def copy(self) -> OwnState:
        """One that passes may change without changing this one."""
        return OwnState(_copied(self.cache, {}))

    def mark(self) -> OwnState:
        """A snapshot that leaves out keys and values which later states still hold, and remembers
        how many they were."""
        snapshot = self.copy()
        for layer in _appended(snapshot.cache).values():
            for name in GROWING:
                setattr(layer, name, getattr(layer, name).shape[-2])
        return snapshot

    def back_to(self, mark: OwnState) -> OwnState:
        """The state as it was at `mark`, a snapshot of an earlier state of the same text."""
        restored = mark.copy()
        later = _appended(self.cache)
        for index, layer in _appended(restored.cache).items():
            for name in GROWING:
                setattr(layer, name, getattr(later[index], name)[..., : getattr(layer, name), :])
        return restored

    def tensors(self) -> Iterator[tuple[int, Tensor]]:
        """Every tensor, and the layer of it."""
        layers = list(getattr(self.cache, "layers", None) or [self.cache])
        extra = {name: value for name, value in _attributes(self.cache).items() if name != "layers"}
        for index, layer in enumerate(layers):
            yield from ((index, tensor) for tensor in _tensors(layer, set()))
        yield from ((0, tensor) for tensor in _tensors(extra, set()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; one that stands in two places counts once."""
        return sum(
            {
                id(tensor): tensor.numel() * tensor.element_size() for _, tensor in self.tensors()
            }.values()
        )

    def first_broken_layer(self) -> int | None:
        """The first layer with a NaN or infinite number; None when all are finite."""
        return min(
            (layer for layer, tensor in self.tensors() if not torch.isfinite(tensor).all()),
            default=None,
        )


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy whose tensors nobody else changes. What stands in two places does so in the copy, too."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        duplicate: Any = value.clone()
    elif isinstance(value, list | tuple):
        duplicate = type(value)([_copied(each, memo) for each in value])
    elif isinstance(value, Mapping):
        duplicate = copy.copy(value)
        for key, each in value.items():
            duplicate[key] = _copied(each, memo)
    elif _is_cache_part(value):
        duplicate = copy.copy(value)
        shared = GROWING if _grows(value) else ()
        for name, each in vars(value).items():
            setattr(duplicate, name, each if name in shared else _copied(each, memo))
    else:
        return value
    memo[id(value)] = duplicate
    return duplicate


def _is_cache_part(value: Any) -> bool:
    """Whether this is an object of a cache, not a config, a module, or a plain value."""
    home = type(value).__module__.partition(".")[0]
    return (
        home in HOMES
        and hasattr(value, "__dict__")
        and not isinstance(value, transformers.PretrainedConfig | nn.Module)
    )


def _grows(layer: Any) -> bool:
    """Whether its keys and values are replaced by longer ones in every pass, never written to."""
    kinds = transformers.cache_utils
    updates = (kinds.DynamicLayer.update, kinds.DynamicSlidingWindowLayer.update)
    return isinstance(layer, kinds.DynamicLayer) and type(layer).update in updates


def _appended(cache: Any) -> dict[int, Any]:
    """By number, the layers whose keys and values begin with those of every earlier state of the
    text."""
    layers = enumerate(getattr(cache, "layers", ()))
    kind = transformers.cache_utils.DynamicLayer
    return {
        index: layer
        for index, layer in layers
        if isinstance(layer, kind) and type(layer).update is kind.update and layer.keys is not None
    }


def _attributes(value: Any) -> Mapping[str, Any]:
    return vars(value) if _is_cache_part(value) else {}


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors below a value, once each."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, seen)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each, seen)
    else:
        for each in _attributes(value).values():
            yield from _tensors(each, seen)
