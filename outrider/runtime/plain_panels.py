"""Panels of a model's plain weights, which starts after the first map and do not make.

A weight that is nothing but multiplied is then not read at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.models.linear.panel import WIDTH
from outrider.runtime.binding import layers_panels
from outrider.runtime.coding import Coder
from outrider.runtime.kept_panels import Item, KeptPanels
from outrider.runtime.matrices import PackedWeight
from outrider.runtime.ops import Code, Program, Source
from outrider.runtime.structures import WeightFormat

DTYPES = (torch.bfloat16, torch.float32)


class _Use(NamedTuple):
    """The way in which a program uses a weight."""

    is_multiplied: bool
    is_of_experts: bool
    transposed: bool
    is_table: bool  # whose rows are embeddings, too


class PlainPanels:
    """The panels of the plain weights of one program, by their names: kept, or to be kept.

    `shapes`: of the weights in the checkpoint, with their types.
    """

    def __init__(
        self,
        kept: KeptPanels,
        program: Program,
        shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        coder: Coder | None,
    ) -> None:
        self._kept = kept
        self._coder = coder
        uses = dict(_uses(program))
        self._uses = {
            name: uses[name]
            for name, (dtype, shape) in shapes.items()
            if name in uses and dtype in DTYPES and len(shape) == 2 + uses[name].is_of_experts
        }
        self._packed: dict[str, PackedWeight] = {}
        for name, panels in kept.kept().items():
            if name in self._uses:
                packed = self._as_packed(name, panels, *shapes[name])
                if packed.is_whole:
                    self._packed[name] = packed

    @property
    def unread(self) -> frozenset[str]:
        """Weights that need not be read, since their panels are all that is used."""
        return frozenset(
            name for name, packed in self._packed.items() if not self._needs_table(name, packed)
        )

    @property
    def only_packed(self) -> frozenset[str]:
        """Weights that are used in panels alone, never as they are stored."""
        return frozenset(name for name, use in self._uses.items() if not use.is_table)

    def put_into(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | PackedWeight]:
        """These weights, with kept panels in place of those that have some, and of as many others
        as can be kept now."""
        missing = {name: tensors[name] for name in self._uses if name not in self._packed}
        items = {
            name: Item(self._panels_bytes(name, weight), partial(self._make, name, weight))
            for name, weight in missing.items()
        }
        for name, panels in self._kept.keep(items).items():
            weight = missing[name]
            self._packed[name] = self._as_packed(name, panels, weight.dtype, weight.shape)
        weights: dict[str, Tensor | PackedWeight] = {**tensors}
        for name, packed in self._packed.items():
            needs_table = self._needs_table(name, packed)
            weights[name] = replace(packed, table=tensors[name]) if needs_table else packed
        return weights

    def _make(
        self, name: str, weight: Tensor
    ) -> tuple[torch.dtype, Sequence[int], Iterable[Tensor]]:
        use = self._uses[name]
        weights = weight if use.is_of_experts else weight.unsqueeze(0)
        _, panels = layers_panels(weights, self._coder, transposed=use.transposed)
        if panels.dtype != torch.uint8 and not use.is_of_experts:
            panels = panels.squeeze(0)
        return panels.dtype, panels.shape, [panels]

    def _panels_bytes(self, name: str, weight: Tensor) -> int:
        """Bytes of a weight's panels, coded or not, at most."""
        transposed = self._uses[name].transposed
        *experts, outputs, inputs = weight.mT.shape if transposed else weight.shape
        return prod(experts) * -(-outputs // WIDTH) * WIDTH * inputs * weight.itemsize

    def _needs_table(self, name: str, packed: PackedWeight) -> bool:
        return self._uses[name].is_table and packed.format != WeightFormat.PANELS_CODED

    def _as_packed(
        self, name: str, panels: Tensor, dtype: torch.dtype, shape: Sequence[int]
    ) -> PackedWeight:
        use = self._uses[name]
        *experts, first, last = shape
        outputs, inputs = (last, first) if use.transposed else (first, last)
        return PackedWeight(
            panels, dtype, outputs, inputs, prod(experts) if experts else 0, use.transposed
        )


def _uses(program: Program) -> Iterator[tuple[str, _Use]]:
    """The weights that are used in one way, and at most as a table of embeddings besides."""
    ways: defaultdict[str, set[_Use]] = defaultdict(set)
    others = {value.name for value in program.values if value.source == Source.CONSTANT}
    for op in (*program.body, *program.head):
        others.add(op.bias)
        if op.code in (Code.LINEAR, Code.EXPERTS):
            ways[op.weight].add(_Use(True, op.code == Code.EXPERTS, op.transposed, False))
        elif op.code == Code.EMBED:
            ways[op.weight].add(_Use(False, False, False, False))
        else:
            others.add(op.weight)
    for name, each in ways.items():
        multiplied = [use for use in each if use.is_multiplied]
        is_table = len(each) > len(multiplied)
        if name in others or len(multiplied) != 1:
            continue
        if not (is_table and (multiplied[0].transposed or multiplied[0].is_of_experts)):
            yield name, multiplied[0]._replace(is_table=is_table)
