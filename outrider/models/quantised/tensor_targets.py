"""Finds which parameter of transformers' module takes each tensor of a checkpoint, by transformers'
own tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outrider.lazy import transformers

# one parameter of several experts' layers; gate and up in one
MERGES = (("MergeModulelist", 0), ("Concatenate", 1))
WEIGHT = ".weight"


@dataclass(frozen=True, order=True)
class ExpertPart:
    """One expert's layer among those that make up a parameter."""

    expert: int
    number: int  # among the layers of one expert that are put together
    path: str


class TensorTargets:
    """The parameters that one model's tensors are loaded into."""

    def __init__(self, module: Any) -> None:
        mapping = transformers.conversion_mapping.get_model_conversion_mapping(module)
        kinds = transformers.core_model_loading
        self._renamings = [one for one in mapping if isinstance(one, kinds.WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, kinds.WeightConverter)]
        self._find = kinds.rename_source_key
        self._num_layers = module.config.get_text_config().num_hidden_layers
        self._parts = {path for path, _ in module.named_modules()}
        self._unused = [
            re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()
        ]

    def is_unused(self, name: str) -> bool:
        """Whether a tensor is of layers that predict further tokens."""
        layer = re.search(r"\.layers\.(\d+)\.", name)
        beyond = layer is not None and int(layer[1]) >= self._num_layers
        beyond = beyond and not self._has_part(name)  # a vision tower may be deeper
        return (
            beyond
            or name.startswith("mtp.")
            or any(pattern.search(name) for pattern in self._unused)
        )

    def _has_part(self, name: str) -> bool:
        """Whether the module has the layer that a tensor belongs to."""
        return self.of(name.rpartition(".")[0] + WEIGHT).removesuffix(WEIGHT) in self._parts

    def of(self, name: str) -> str:
        """The name of a tensor in the module."""
        return str(self._find(name, self._renamings, [])[0])

    def merged(self, paths: Iterable[str]) -> dict[str, list[ExpertPart]]:
        """Parameters that several layers make up, and these in order."""
        groups: dict[str, list[ExpertPart]] = {}
        for path in paths:
            target, pattern = self._find(path + WEIGHT, self._renamings, self._converters)
            converter = next(
                (
                    converter
                    for converter in self._converters
                    if pattern in converter.source_patterns
                ),
                None,
            )
            if converter is None or not _is_merge(converter):
                continue
            renamed = self.of(path + WEIGHT)
            # its dots may be escaped, as in a regular expression
            expert = re.search(pattern.replace("*.", r"(\d+)\."), renamed)
            assert expert is not None, f"'{renamed}' is no '{pattern}'"
            groups.setdefault(target, []).append(
                ExpertPart(int(expert[1]), converter.source_patterns.index(pattern), path)
            )
        return {target: sorted(parts) for target, parts in groups.items()}


def _is_merge(converter: Any) -> bool:
    return all(
        (type(operation).__name__, getattr(operation, "dim", None)) in MERGES
        for operation in converter.operations
    )
