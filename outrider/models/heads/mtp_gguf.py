"""MTP heads inside GGUF files: the layers that llama.cpp calls nextn, after the target's own.

    blk.N.nextn.{eh_proj, enorm, hnorm, shared_head_norm}    projection and norms; N counts on from the target's layers
    blk.N.*                                                  a decoder layer of the family, named as its other layers are
    blk.N.nextn.{embed_tokens, shared_head_head}             copies of the target's tables, not read

Such a layer is loaded as a model of one layer by the same code as the target: what the converter
rearranged is undone alike, and weights stay in their blocks where the target's do. Files of Qwen's
have norms and projection of several layers once. A file may hold nothing but a head and copies of
its target's tables and final norm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from outrider.errors import CheckpointError
from outrider.models.families import MTP_LAYOUTS, MTP_USUAL
from outrider.models.gguf.architectures import arranging
from outrider.models.gguf.config import num_extra_layers
from outrider.models.gguf.experts import SAME, staying
from outrider.models.gguf.formats import FORMS
from outrider.models.gguf.header import GgufFile, TensorInfo
from outrider.models.gguf.linear import BlockLinear
from outrider.models.gguf.loading import GgufLoading, divide_frequencies, make_buffers, plain_values
from outrider.models.gguf.packing import Packer, panels_in
from outrider.models.gguf.weights import tensor_bytes
from outrider.models.heads.mtp import MtpLayer
from outrider.models.heads.mtp_body import body_of, empty_model, one_layer_config
from outrider.models.heads.mtp_layout import MtpLayout

TENSOR = re.compile(r"blk\.(?P<block>\d+)\.(?P<name>.+)")
PROJECTION = "nextn.eh_proj.weight"
NORMS = {"nextn.enorm.weight": "embed_norm", "nextn.hnorm.weight": "hidden_norm"}
# the norm before the output head: the first that is there
FINAL = ("nextn.shared_head_norm.weight", "layer_output_norm.weight")
OUTPUT_NORM = "output_norm.weight"
# tensors of no layer
EVERYWHERE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LOOKED_FOR = ", ".join(f"blk.{{next}}.{name}" for name in (PROJECTION, *NORMS))


@dataclass(frozen=True)
class NextnHead:
    """The tensors of a file that make an MTP head, by its header."""

    file: GgufFile
    first: int  # number of its first layer

    @property
    def layout(self) -> MtpLayout:
        """The layout of the family's safetensors checkpoints: the usual one, unless another names
        the file's architecture."""
        named = (layout for layout in MTP_LAYOUTS.values() if self.file.architecture in layout.gguf)
        return next(named, MTP_USUAL)

    @cached_property
    def layers(self) -> list[dict[str, TensorInfo]]:
        """The tensors of each layer by their names after its number."""
        layers: dict[int, dict[str, TensorInfo]] = {}
        for tensor in self.file.tensors:
            name = TENSOR.fullmatch(tensor.name)
            if name is not None and int(name["block"]) >= self.first:
                layers.setdefault(int(name["block"]), {})[name["name"]] = tensor
        return [layers[block] for block in sorted(layers)]

    @property
    def is_alone(self) -> bool:
        """Whether the file lacks the layers of the target."""
        return (
            not any(tensor.name.startswith("blk.0.") for tensor in self.file.tensors)
            or self.first == 0
        )

    def beside(self, index: int, name: str) -> TensorInfo | None:
        """A norm or the projection of a layer: the first layer's, where it has none of its own."""
        return self.layers[index].get(name) or self.layers[0].get(name)

    def final_norm(self, index: int) -> TensorInfo | None:
        """The norm before the output head, which is the target's where the layer has none."""
        norm = next(
            (found for name in FINAL if (found := self.beside(index, name)) is not None), None
        )
        return norm or next(
            (tensor for tensor in self.file.tensors if tensor.name == OUTPUT_NORM), None
        )

    def of_layer(self, index: int) -> list[TensorInfo]:
        """The decoder layer's tensors, with the norm after it, as a model of that layer alone
        would have them."""
        tensors = [tensor for tensor in self.file.tensors if tensor.name in EVERYWHERE]
        for name, tensor in self.layers[index].items():
            if not name.startswith("nextn.") and name not in FINAL:
                second = self.layout.second_block
                is_second = second is not None and second.match(name) is not None
                name = (
                    "attn_norm.weight"
                    if is_second and name.startswith("post_attention_norm")
                    else name
                )
                tensors.append(replace(tensor, name=f"blk.{int(is_second)}.{name}"))
        norm = self.final_norm(index)
        return tensors if norm is None else [*tensors, replace(norm, name=OUTPUT_NORM)]

    @property
    def lacking(self) -> list[str]:
        """Tensors that a head must have and that are not there."""
        lacking = []
        for index, layer in enumerate(self.layers):
            needed = [name for name in (PROJECTION, *NORMS) if self.beside(index, name) is None]
            needed += ["attn_output.weight"] if "attn_output.weight" not in layer else []
            lacking += [f"blk.{self.first + index}.{name}" for name in needed]
        return lacking

    def bytes_of(self, dtype: torch.dtype, *, experts_stay: bool = True) -> int:
        """Bytes of its weights once loaded."""
        stay = staying(self.file, experts=experts_stay)
        used = {
            tensor.name: tensor for index in range(len(self.layers)) for tensor in self._used(index)
        }
        return sum(tensor_bytes(list(used.values()), stay, dtype))

    def _used(self, index: int) -> Iterator[TensorInfo]:
        yield from (
            tensor for name, tensor in self.layers[index].items() if not name.startswith("nextn.")
        )
        beside = (self.beside(index, name) for name in (PROJECTION, *NORMS, *FINAL))
        yield from (tensor for tensor in beside if tensor is not None)


def find_nextn(file: GgufFile, num_layers: int | None = None) -> NextnHead | None:
    """The head in a file whose target has `num_layers` layers (None: as many as its metadata says);
    None where there is none."""
    count = (
        num_layers
        if num_layers is not None
        else int(file.of_model("block_count", 0)) - num_extra_layers(file)
    )
    names = {tensor.name for tensor in file.tensors}
    return (
        NextnHead(file, count)
        if any(f"blk.{count}.{name}" in names for name in (PROJECTION, *NORMS))
        else None
    )


def nextn_layer(
    head: NextnHead,
    index: int,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    pack: Packer,
    *,
    blocks_stay: bool,
) -> MtpLayer:
    """One layer of a head for a target with this config. `blocks_stay`: weights in blocks stay so;
    else all are widened."""
    file = head.file
    what = f"the MTP head in '{file.path}' (blk.{head.first + index})"
    tensors = head.of_layer(index)
    text = one_layer_config(
        config,
        has_experts=any("_exps." in tensor.name for tensor in tensors),
        kinds=head.layout.kinds,
    )
    alone = replace(file, tensors=tuple(tensors))
    with torch.no_grad():
        module = empty_model(what, text, dtype)
        make_buffers(module)
        stay = staying(alone, experts=device.type == "cpu") if blocks_stay else frozenset()
        GgufLoading(alone, module, text, dtype, stay, pack).run()
        divide_frequencies(module, file)
    layer = MtpLayer(
        *body_of(what, module, device), config.get_text_config().hidden_size, bias=False
    )
    arrange = arranging(file, config)
    with torch.no_grad():
        for name, part in NORMS.items():
            _put_norm(what, head.beside(index, name), getattr(layer, part), arrange)
        projection = _projection(
            what, head, index, layer.projection, dtype, pack, blocks_stay=blocks_stay
        )
        layer.add_module("projection", projection.to(device))
    return layer.requires_grad_(False)


def _put_norm(what: str, tensor: TensorInfo | None, norm: Any, arrange: Callable[..., Any]) -> None:
    assert tensor is not None  # `lacking` is empty
    values = torch.from_numpy(arrange(plain_values(tensor), tensor.name).copy())
    _check_shape(what, tensor, tuple(norm.weight.shape))
    norm.weight.copy_(values)


def _projection(
    what: str,
    head: NextnHead,
    index: int,
    like: nn.Linear,
    dtype: torch.dtype,
    pack: Packer,
    *,
    blocks_stay: bool,
) -> nn.Module:
    tensor = head.beside(index, PROJECTION)
    assert tensor is not None
    _check_shape(what, tensor, tuple(like.weight.shape))
    outputs, inputs = tensor.shape
    if blocks_stay and tensor.kind.name in FORMS:
        (panels,) = panels_in([((tensor,), SAME)], pack)
        return BlockLinear(panels, FORMS[tensor.kind.name], outputs, inputs, dtype)
    like.weight = nn.Parameter(
        torch.from_numpy(plain_values(tensor).copy()).to(dtype), requires_grad=False
    )
    return like


def _check_shape(what: str, tensor: TensorInfo, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{what}: tensor '{tensor.name}' has shape {list(tensor.shape)}, expected "
            f"{list(wanted)}: it was made for another "
            "target."
        )
