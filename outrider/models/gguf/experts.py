"""The experts of a GGUF file: which of its tensors make up each parameter of transformers' module,
and in which order."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.models.gguf.formats import FORMS
from outrider.models.gguf.header import GgufFile

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
PARTS = {  # in one of these ways
    "gate_up_proj": (("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_up_exps",)), "up_proj": (("ffn_up_exps",),),
    "down_proj": (("ffn_down_exps",),),
}  # fmt: skip
PAIRED = ("ffn_gate_exps", "ffn_up_exps")  # whose rows lie in one matrix
SAME = np.empty(0, np.int64)  # the rows as they are


@dataclass(frozen=True)
class Experts:
    """One parameter of all experts of a layer."""

    owner: str
    name: str
    tensors: tuple[str, ...]  # whose outputs follow one another, for each expert
    is_interleaved: bool  # outputs of both in turn
    is_transposed: bool  # the module has (inputs, outputs)

    @property
    def path(self) -> str:
        return f"{self.owner}.{self.name}"

    def order(self, outputs: int) -> np.ndarray:
        """Which of this many stored outputs each output is."""
        return (
            np.arange(outputs, dtype=np.int64).reshape(2, -1).T.flatten()
            if self.is_interleaved
            else SAME
        )


def experts_in(module: Any, names: Collection[str]) -> list[Experts]:
    """The parameters of experts whose tensors are all among `names`."""
    experts = []
    for path, part in module.named_modules():
        layer = LAYER.search(path)
        if layer is None or not hasattr(part, "has_gate"):
            continue
        for name, _ in part.named_parameters(recurse=False):
            kind = name.removesuffix("_bias")
            end = "bias" if name.endswith("_bias") else "weight"
            for way in PARTS.get(kind, ()):
                tensors = tuple(f"blk.{layer[1]}.{each}.{end}" for each in way)
                if all(each in names for each in tensors):
                    interleaved = kind == "gate_up_proj" and not part.is_concatenated
                    experts.append(
                        Experts(
                            path, name, tensors, interleaved, part.is_transposed and end == "weight"
                        )
                    )
    return experts


def staying(file: GgufFile, *, experts: bool = True) -> frozenset[str]:
    """The tensors that keep their blocks: matrices, and with `experts` theirs, of formats that the
    kernels multiply."""
    kinds = {tensor.name: tensor.kind for tensor in file.tensors}
    tensors = [tensor for tensor in file.tensors if tensor.kind.name in FORMS]
    matrices = [tensor.name for tensor in tensors if len(tensor.shape) == 2]
    theirs = [
        tensor
        for tensor in tensors
        if experts and len(tensor.shape) == 3 and "_exps." in tensor.name
    ]
    return frozenset(
        [
            *matrices,
            *(
                group.name
                for group in theirs
                if kinds.get(_beside(group.name), group.kind) == group.kind
            ),
        ]
    )


def _beside(name: str) -> str:
    """The tensor that lies in one matrix with this one."""
    first, second = PAIRED
    return name.replace(first, second) if first in name else name.replace(second, first)
