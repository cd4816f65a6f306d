"""The places of a loaded model's tensors in its checkpoint's files, so that the next start reads them without a module.

A tensor is the stored one of its name where both have the same bits. Matrices in blocks of a GGUF file come with the place
that loading found for them. A few numbers that no file has are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from outrider.models.gguf.formats import FORMS, Form
from outrider.models.gguf.header import GgufFile
from outrider.models.gguf.names import gguf_in
from outrider.models.gguf.weights import SAME, panels_in, plain_values
from outrider.models.loading import tensor_text
from outrider.models.loading.memory import weight_files

FEW = 4096  # numbers that are kept where no file has them

Stored = Callable[[str], Tensor | None]  # a tensor as a file has it, by its name there; None where it has none


class InBlocks(NamedTuple):
    """Weights (outputs, inputs) in panels."""

    panels: Tensor
    form: Form
    outputs: int
    inputs: int


def find_stored(name: str, module: Any, tensors: Mapping[str, Tensor], in_blocks: Collection[str]) -> dict[str, Any] | None:
    """The places of parameters and layers in the checkpoint, as plain data; None where one of them is unknown."""
    places = getattr(module, "outrider_places", {})
    if not all(layer in places for layer in in_blocks):
        return None
    orders: list[np.ndarray] = [SAME]
    blocks = {layer: [places[layer].tensor, _number(orders, places[layer].order)] for layer in in_blocks}
    plain: dict[str, list[str]] = {}
    few: dict[str, Any] = {}
    with _stored(name) as stored:
        for own, tensor in tensors.items():
            there = places[own].tensor if own in places else own
            if _is_same(stored(there), tensor):
                plain[own] = [there, str(tensor.dtype).removeprefix("torch.")]
            elif tensor.numel() <= FEW:
                few[own] = tensor_text.written(tensor)
            else:
                return None
    texts = [tensor_text.written(torch.from_numpy(order.astype(np.int32))) for order in orders]
    return {"plain": plain, "few": few, "blocks": blocks, "orders": texts}


def read_stored(name: str, kept: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, InBlocks]]:
    """The tensors, and the layers in blocks, that `find_stored` found."""
    tensors = {own: tensor_text.read(text) for own, text in kept["few"].items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # they copy, and would wait for one another longer than that takes
    try:
        with _stored(name) as stored:
            for own, (there, dtype) in kept["plain"].items():
                tensor = stored(there)
                assert tensor is not None, f"the file has lost '{there}'"
                tensors[own] = tensor.to(getattr(torch, dtype), copy=True)
    finally:
        torch.set_num_threads(threads)
    return tensors, _read_blocks(name, kept["blocks"], kept["orders"])


def _read_blocks(name: str, kept: Mapping[str, Any], texts: Sequence[list[Any]]) -> dict[str, InBlocks]:
    file = gguf_in(name)
    if file is None or not kept:
        return {}
    infos = {tensor.name: tensor for tensor in file.tensors}
    orders = [SAME, *(tensor_text.read(text).numpy().astype(np.int64) for text in texts[1:])]
    each = dict.fromkeys((tensor, order) for tensor, order in kept.values())  # an output layer may be the table of embeddings
    panels = dict(zip(each, panels_in([(infos[tensor], orders[order]) for tensor, order in each]), strict=True))
    return {
        layer: InBlocks(panels[tensor, order], FORMS[infos[tensor].kind.name], *infos[tensor].shape)
        for layer, (tensor, order) in kept.items()
    }


def _number(orders: list[np.ndarray], order: np.ndarray) -> int:
    """The number of an order of rows in the list, where it is put unless it is there."""
    for number, known in enumerate(orders):
        if known is order or (len(known) and np.array_equal(known, order)):
            return number
    orders.append(order)
    return len(orders) - 1


def _is_same(stored: Tensor | None, tensor: Tensor) -> bool:
    if stored is None or stored.shape != tensor.shape:
        return False
    bits = (one.contiguous().view(-1).view(torch.uint8) for one in (stored.to(tensor.dtype), tensor.detach()))
    return torch.equal(*bits)


@contextmanager
def _stored(name: str) -> Iterator[Stored]:
    """The tensors of a checkpoint's files; none of kinds that are not read here."""
    file = gguf_in(name)
    if file is not None:
        yield _of_gguf(file)
        return
    with ExitStack() as stack:
        files = [file for file in weight_files(Path(name).expanduser()) if file.suffix == ".safetensors"]
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        keys = {key: one for one in opened for key in one.keys()}  # noqa: SIM118  no mapping
        yield lambda key: keys[key].get_tensor(key) if key in keys else None


def _of_gguf(file: GgufFile) -> Stored:
    infos = {tensor.name: tensor for tensor in file.tensors}
    return lambda key: torch.from_numpy(np.array(plain_values(infos[key]))) if key in infos else None
