"""The files and names that a loaded model's tensors are stored under, so that the next start reads
them without a module.

A tensor is one of the checkpoint's files, or several of them put together (layers of experts),
where both have the same bits. Matrices in blocks of a GGUF file come with the path that loading
found for them. What no file of the checkpoint has is kept: a few numbers as they are, rounded and
repacked weights in a file of their own.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from outrider.models.gguf.experts import SAME
from outrider.models.gguf.formats import FORMS, Form
from outrider.models.gguf.loading import plain_values
from outrider.models.gguf.packing import Stored
from outrider.models.loading.kept_weights import keep_weights, kept_weights
from outrider.models.loading.weight_files import weight_files
from outrider.models.quantised.tensor_targets import WEIGHT, TensorTargets
from outrider.models.source import ModelSource

FEW = 4096  # numbers that are kept where no file has them


PanelMaker: TypeAlias = Callable[[Mapping[str, Stored]], Mapping[str, Tensor]]


class Packing(Protocol):
    """The way in which plain weights are packed afterwards."""

    @property
    def unread(self) -> Container[str]:
        """Weights that are in panels already."""

    @property
    def only_packed(self) -> Container[str]:
        """Weights of which nothing but panels stays."""


class KeptAt(NamedTuple):
    """The file for what loading makes, and the key that it is kept under."""

    path: Path
    key: str


class InBlocks(NamedTuple):
    """Weights ([experts,] outputs, inputs) in panels."""

    panels: Tensor
    form: Form
    outputs: int
    inputs: int


class _Files(NamedTuple):
    """The tensors of a checkpoint's files, by their names there; none of kinds that are not read
    here."""

    names: frozenset[str]
    read: Callable[[str], Tensor]


def find_stored(
    source: ModelSource,
    module: Any,
    tensors: Mapping[str, Tensor],
    in_blocks: Mapping[str, Any],
    made_at: KeptAt,
) -> dict[str, Any]:
    """The files and names of parameters and layers, as plain data. Raises OSError where what
    loading made cannot be kept.

    `in_blocks`: layers with the attributes of `InBlocks`; `made_at`: file and key for what the
    checkpoint does not have.
    """
    stored_at = getattr(module, "outrider_stored", {})
    orders: list[np.ndarray] = [SAME]
    known = [(layer, stored_at[layer]) for layer in in_blocks if layer in stored_at]
    blocks = {
        layer: [stored_tensor.tensors, _number(orders, stored_tensor.order)]
        for layer, stored_tensor in known
    }
    plain: dict[str, list[Any]] = {}
    few: dict[str, Any] = {}
    computed = _Made()
    with _files(source) as files:
        origins = _Origins(module, files.names)
        for name, tensor in tensors.items():
            there = stored_at[name].tensors if name in stored_at else origins.of(name)
            if there and _is_same(_joined(files, there, tensor.shape), tensor):
                plain[name] = [there, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            elif tensor.numel() <= FEW:
                few[name] = tensor_as_text(tensor)
            else:
                computed.tensors[name] = computed.key(tensor)
    for layer, matrix in in_blocks.items():
        if layer not in blocks:
            computed.matrices[layer] = [
                computed.key(matrix.panels),
                _form_text(matrix.form),
                matrix.outputs,
                matrix.inputs,
            ]
    texts = [tensor_as_text(torch.from_numpy(order.astype(np.int32))) for order in orders]
    return {
        "plain": plain,
        "few": few,
        "blocks": blocks,
        "orders": texts,
        "made": computed.keep(made_at),
    }


def read_stored(
    source: ModelSource,
    record: Mapping[str, Any],
    made_at: KeptAt,
    make_panels: PanelMaker,
    packing: Packing,
) -> tuple[dict[str, Tensor], dict[str, InBlocks]] | None:
    """The tensors, and the layers in blocks, that `find_stored` found; None where the file of what
    loading made is damaged.

    What `packing` packs is given as the files have it, mapped.
    """
    names = {*record["made"]["tensors"].values()}
    names |= {key for key, *_ in record["made"]["matrices"].values()}
    computed = kept_weights(*made_at) if names else {}
    if not names <= computed.keys():
        return None
    tensors = {name: tensor_of_text(text) for name, text in record["few"].items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # they copy, and would wait for one another longer than that takes
    try:
        with _files(source) as files:
            for name, (there, dtype, shape) in record["plain"].items():
                if name in packing.unread:
                    continue
                tensor = _joined(files, there, shape)
                assert tensor is not None, f"the file has lost '{there[0]}'"
                stays = name not in packing.only_packed
                tensors[name] = tensor.to(getattr(torch, dtype), copy=stays)
    finally:
        torch.set_num_threads(threads)
    tensors |= {name: computed[key] for name, key in record["made"]["tensors"].items()}
    blocks = {
        layer: InBlocks(computed[key], _form(text), *sizes)
        for layer, (key, text, *sizes) in record["made"]["matrices"].items()
    }
    return tensors, blocks | _read_blocks(source, record["blocks"], record["orders"], make_panels)


class _Made:
    """Tensors that no file of the checkpoint has, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, str] = {}
        self.matrices: dict[str, list[Any]] = {}
        self._keys: dict[tuple[int, torch.Size], str] = {}
        self._known: dict[str, Tensor] = {}

    def key(self, tensor: Tensor) -> str:
        """The tensor's name in the file."""
        key = self._keys.setdefault((tensor.data_ptr(), tensor.shape), str(len(self._keys)))
        self._known[key] = tensor
        return key

    def keep(self, made_at: KeptAt) -> dict[str, Any]:
        if self._known:
            keep_weights(*made_at, self._known)
        return {"tensors": self.tensors, "matrices": self.matrices}


class _Origins:
    """Which tensors of the files a parameter is made up of, by transformers' tables where it is
    none of the same name."""

    def __init__(self, module: Any, names: frozenset[str]) -> None:
        self._module = module
        self._names = names
        self._renamed = dict[str, list[str]]()

    def of(self, entry_name: str) -> list[str]:
        """None of them where nobody knows."""
        if entry_name in self._names:
            return [entry_name]
        if not self._renamed:
            targets = TensorTargets(self._module)
            self._renamed = {targets.of(name): [name] for name in self._names}
            merged = targets.merged(
                name.removesuffix(WEIGHT) for name in self._names if name.endswith(WEIGHT)
            )
            self._renamed |= {
                target: [part.path + WEIGHT for part in parts] for target, parts in merged.items()
            }
        return self._renamed.get(entry_name, [])


def _joined(files: _Files, names: Sequence[str], shape: Sequence[int]) -> Tensor | None:
    """One tensor, or the rows of several, in this shape; None where they do not make it up."""
    if not files.names.issuperset(names):
        return None
    parts = [files.read(name) for name in names]
    if len(parts) > 1 and len({part.shape[-1] for part in parts}) > 1:
        return None
    # experts of GGUF have three
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=max(0, parts[0].dim() - 2))
    return (
        tensor.view(tuple(shape))
        if tensor.shape == tuple(shape) or (len(parts) > 1 and tensor.numel() == prod(shape))
        else None
    )


def _form_text(form: Form) -> dict[str, Any]:
    return asdict(form) | {
        "factors": str(form.factors).removeprefix("torch."),
        "levels": list(form.levels),
    }


def _form(text: Mapping[str, Any]) -> Form:
    return Form(
        **{**text, "factors": getattr(torch, text["factors"]), "levels": tuple(text["levels"])}
    )


def _read_blocks(
    source: ModelSource,
    record: Mapping[str, Any],
    texts: Sequence[list[Any]],
    make_panels: PanelMaker,
) -> dict[str, InBlocks]:
    if source.gguf is None or not record:
        return {}
    infos = {tensor.name: tensor for tensor in source.gguf.tensors}
    orders = [SAME, *(tensor_of_text(text).numpy().astype(np.int64) for text in texts[1:])]
    known = {
        layer: ([infos[name] for name in names], number)
        for layer, (names, number) in record.items()
    }
    # an output layer may be the embeddings
    stored = {
        _called(*place): ([infos[name] for name in place[0]], orders[place[1]])
        for place in record.values()
    }
    panels = make_panels(stored)
    return {
        layer: InBlocks(
            panels[_called(*record[layer])],
            FORMS[tensors[0].kind.name],
            len(orders[number]) or sum(tensor.shape[-2] for tensor in tensors),
            tensors[0].shape[-1],
        )
        for layer, (tensors, number) in known.items()
    }


def _called(names: Sequence[str], order: int) -> str:
    """A name for the panels of these tensors in this order."""
    return f"{' '.join(names)} {order}"


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
    bits = (
        numbers.contiguous().view(-1).view(torch.uint8)
        for numbers in (stored.to(tensor.dtype), tensor.detach())
    )
    return torch.equal(*bits)


@contextmanager
def _files(source: ModelSource) -> Iterator[_Files]:
    if source.gguf is not None:
        infos = {tensor.name: tensor for tensor in source.gguf.tensors}
        yield _Files(
            frozenset(infos), lambda key: torch.from_numpy(np.array(plain_values(infos[key])))
        )
        return
    with ExitStack() as stack:
        folder = source.folder or Path(source.name)
        files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        keys = {key: one for one in opened for key in one.keys()}  # noqa: SIM118  no mapping
        yield _Files(frozenset(keys), lambda key: keys[key].get_tensor(key))


def tensor_as_text(tensor: Tensor) -> list[Any]:
    """A few numbers as plain data, to the bit, for `tensor_of_text`."""
    flat = tensor.new_empty(tensor.numel()).copy_(tensor.detach().flatten())
    raw = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    return [
        str(tensor.dtype).removeprefix("torch."),
        list(tensor.shape),
        base64.b64encode(raw).decode(),
    ]


def tensor_of_text(record: list[Any]) -> Tensor:
    """The tensor that `tensor_as_text` wrote down."""
    name, shape, text = record
    raw = bytearray(base64.b64decode(text))
    dtype = getattr(torch, name)
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)
