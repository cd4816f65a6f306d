"""MTP heads on disk: found in the target's own checkpoint, or in a folder of their own, by the
names of tensors; written there.

transformers drops these tensors when it loads the target, so they are read from the safetensors
files here, from GGUF files in `mtp_gguf.py`. Weights in fp8 are widened by their scales; without
them a head would draft, and nothing of it would ever be kept, so it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError, CheckpointError, OutriderError
from outrider.models.families import MTP_LAYOUTS, MTP_NOT_READ
from outrider.models.gguf.header import GgufFile
from outrider.models.gguf.packing import Packer, by_torch
from outrider.models.heads.assistant import check_fits, is_assistant
from outrider.models.heads.mtp import MtpConfig, MtpHead, MtpLayer
from outrider.models.heads.mtp_body import make_body
from outrider.models.heads.mtp_gguf import LOOKED_FOR as NEXTN
from outrider.models.heads.mtp_gguf import NextnHead, find_nextn, nextn_layer
from outrider.models.heads.mtp_layout import (
    BLOCK,
    EMBED_NORM,
    HIDDEN_NORM,
    NORM,
    PROJECTION,
    MtpLayout,
    MtpTensors,
    find_tensors,
    strangers,
)
from outrider.models.heads.source import (
    Stored,
    check_numbers,
    of_safetensors,
    read_config,
    read_weights,
    with_scales,
    write_head,
)
from outrider.models.loaded import ModelMemory
from outrider.models.loading.memory import folder_weights_bytes, layer_kv_bytes
from outrider.models.loading.weight_files import safetensors_header, weight_files
from outrider.models.source import ModelSource, resolve, weights_folder
from outrider.wellformed import load_object

INSTEAD = "Use --drafter ngram, or train a head: outrider train mtp"


@dataclass(frozen=True)
class MtpFiles:
    """The tensors of a folder that make an MTP head, by their headers."""

    folder: Path
    tensors: MtpTensors
    stored: Mapping[str, Stored]  # by their names in the folder, those that scale others left out

    @property
    def layout(self) -> MtpLayout:
        return self.tensors.layout

    @property
    def num_weights(self) -> int:
        """Numbers in the head's weights."""
        return sum(
            math.prod(self.stored[name].shape) for name in self.tensors.names if name in self.stored
        )

    def check(self) -> None:
        """Raises CheckpointError for lacking parts and weights in numbers that are not read."""
        what = f"the MTP head in '{self.folder}'"
        if lacking := self.tensors.lacking:
            which = f"{what} ({self.layout.name} layout)"
            raise CheckpointError(
                f"{which} is incomplete: it lacks the {', the '.join(lacking[:3])}. {INSTEAD}."
            )
        for name in self.tensors.names:
            if name in self.stored:
                check_numbers(self.stored[name], what)

    def read(self, index: int) -> dict[str, Tensor]:
        """A layer's tensors by our names, in plain numbers."""
        names = self.tensors.layers[index].items()
        what = f"the MTP head in '{self.folder}'"
        return {
            ours: read_weights(self.stored[there], what)
            for ours, there in names
            if there in self.stored
        }


def find_mtp(folder: Path, num_layers: int) -> MtpFiles | None:
    """The head in a folder of a target with `num_layers` layers; None where there is none of a
    known layout.

    Raises CheckpointError for damaged files.
    """
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
    stored = [tensor for file in files for tensor in of_safetensors(file)]
    tensors = find_tensors(MTP_LAYOUTS.values(), (tensor.name for tensor in stored), num_layers)
    if tensors is None:
        return None
    names = set(tensors.names)
    own = with_scales(tensor for tensor in stored if tensor.name in names)
    return MtpFiles(folder, tensors, {tensor.name: tensor for tensor in own})


def ships_mtp(name: str, device: str = "cpu") -> bool:
    """Whether a local checkpoint, or one in the hub's cache, has an MTP head that drafts on this
    device ('auto', 'cpu', 'cuda').

    Damaged files have none.
    """
    try:
        source = resolve(name, fetches=False)
        if source.gguf is not None:
            nextn = find_nextn(source.gguf)
            return nextn is not None and not nextn.is_alone and not nextn.lacking
        folder = weights_folder(source, fetches=False)
        config = {} if folder is None else load_object(folder / "config.json")
        text = config.get("text_config") or config
        # Nemotron-H names no number
        layers = text.get("num_hidden_layers") or len(text["layers_block_type"])
        if folder is None or not isinstance(layers, int) or _not_read(config.get("model_type")):
            return False
        on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        if on_cuda and text.get("index_topk"):  # an indexer's keys are in our cache on a CPU alone
            return False
        head = find_mtp(folder, layers)
        if head is not None:
            head.check()
    except (OSError, ValueError, AttributeError, KeyError, TypeError, OutriderError):
        return False
    return head is not None


def weigh_mtp(source: ModelSource, config: Any, dtype: torch.dtype) -> ModelMemory:
    """The memory of the head in a checkpoint or folder; nothing is known of one that is still on
    the hub. Raises as `load_mtp`."""
    name = source.name
    assistant = is_assistant(source)
    if assistant:
        check_fits(source, config)
    if source.gguf is not None:
        if assistant:
            return ModelMemory(
                name, sum(tensor.num_weights for tensor in source.gguf.tensors) * dtype.itemsize, 0
            )
        nextn = _nextn(source.gguf, config)
        return ModelMemory(
            name, nextn.bytes_of(dtype), layer_kv_bytes(config, dtype) * len(nextn.layers)
        )
    folder = weights_folder(source, fetches=False)
    if folder is None:
        return ModelMemory(name, 0, 0)
    if assistant:
        return ModelMemory(name, folder_weights_bytes(folder, dtype), 0)
    files = _found(folder, config)
    return ModelMemory(
        name,
        files.num_weights * dtype.itemsize,
        layer_kv_bytes(config, dtype) * len(files.tensors.layers),
    )


def num_mtp_layers(source: ModelSource, num_layers: int) -> int:
    """How many layers the head in a checkpoint on this machine has, alongside a target of
    `num_layers`; 0: there is none."""
    if source.gguf is not None:
        nextn = find_nextn(source.gguf, num_layers)
        return 0 if nextn is None else len(nextn.layers)
    files = None if source.folder is None else find_mtp(source.folder, num_layers)
    return 0 if files is None else len(files.tensors.layers)


def load_mtp(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    pack: Packer = by_torch,
    *,
    blocks_stay: bool = True,
) -> MtpHead:
    """The head for a target with this config, still to be bound to its tables.

    `source`: the target's checkpoint, or one with a head alone. `blocks_stay`: weights of GGUF
    files keep their blocks, else they are widened. Raises CheckpointError where there is no head,
    or it does not fit, CapabilityError for one whose layer cannot run here.
    """
    file = source.gguf
    if file is not None:
        nextn = _nextn(file, config)
        text = config.get_text_config()
        head_config = MtpConfig(
            nextn.layout.name,
            text.hidden_size,
            max_position_embeddings=file.of_model("context_length"),
        )
        layers = range(len(nextn.layers))
        return MtpHead(
            head_config,
            [
                nextn_layer(nextn, index, config, dtype, device, pack, blocks_stay=blocks_stay)
                for index in layers
            ],
        ).eval()
    folder = weights_folder(source)
    assert folder is not None
    files = _found(folder, config)
    layout = files.layout
    text = config.get_text_config()
    stored = read_config(folder)
    settings = stored.get("outrider")
    known = (stored.get("text_config") or stored).get("max_position_embeddings")
    trained_for = str(settings.get("target", "")) if isinstance(settings, dict) else ""
    head_config = MtpConfig(layout.name, text.hidden_size, layout.hidden_first, known, trained_for)
    return MtpHead(
        head_config,
        [_layer(files, index, config, dtype, device) for index in range(len(files.tensors.layers))],
    ).eval()


def _layer(
    files: MtpFiles, index: int, config: Any, dtype: torch.dtype, device: torch.device
) -> MtpLayer:
    what = f"the MTP head in '{files.folder}' ({files.layout.name} layout), layer {index}"
    tensors = files.read(index)
    size = config.get_text_config().hidden_size
    bias = f"{PROJECTION}.bias" in tensors
    body = make_body(what, config, tensors, dtype, device, kinds=files.layout.kinds, index=index)
    layer = MtpLayer(*body, size, bias=bias)
    with torch.no_grad():
        for part in (EMBED_NORM, HIDDEN_NORM, PROJECTION):
            for name, parameter in getattr(layer, part).named_parameters():
                stored = tensors.get(f"{part}.{name}")
                if stored is None or stored.shape != parameter.shape:
                    fault = (
                        "is missing"
                        if stored is None
                        else f"has shape {list(stored.shape)}, expected {list(parameter.shape)}"
                    )
                    raise CheckpointError(
                        f"{what}: tensor '{part}.{name}' {fault}: it was trained for another "
                        "target."
                    )
                parameter.copy_(stored)
    return layer.requires_grad_(False)


def _found(folder: Path, config: Any) -> MtpFiles:
    """The files of a head in a checkpoint. Raises CheckpointError, saying what was looked for,
    where there is no head."""
    num_layers = config.get_text_config().num_hidden_layers
    if what := _not_read(config.model_type):
        raise CapabilityError(
            f"'{folder}': MTP heads of {config.model_type} are not read, which have {what}. "
            f"{INSTEAD}."
        )
    files = find_mtp(folder, num_layers)
    if files is None:
        names = [
            name
            for file in weight_files(folder)
            if file.suffix == ".safetensors"
            for name in safetensors_header(file)
        ]
        others = strangers(names)
        if others:
            raise CheckpointError(
                f"'{folder}' has an MTP head of a layout that is not read (tensor '{others[0]}'). "
                f"{INSTEAD}."
            )
        looked_for = ", ".join(layout.looked_for(num_layers) for layout in MTP_LAYOUTS.values())
        raise CheckpointError(
            f"'{folder}' has no MTP head: none of its tensors is {looked_for}. {INSTEAD}."
        )
    files.check()
    size = config.get_text_config().hidden_size
    name = files.tensors.layers[0][f"{PROJECTION}.weight"]
    wanted = [size, 2 * size]
    if (shape := list(files.stored[name].shape)) != wanted:
        raise CheckpointError(
            f"the MTP head in '{folder}': tensor '{name}' has shape {shape}, expected {wanted}: "
            "it was trained for "
            "another target."
        )
    return files


def _nextn(file: GgufFile, config: Any) -> NextnHead:
    """The head of a GGUF file. Raises CheckpointError, saying what was looked for, where there is
    none."""
    num_layers = config.get_text_config().num_hidden_layers
    nextn = find_nextn(file, num_layers)
    if nextn is None:
        looked_for = NEXTN.format(next=num_layers)
        raise CheckpointError(
            f"'{file.path}' has no MTP head: none of its tensors is {looked_for}. {INSTEAD}."
        )
    if lacking := nextn.lacking:
        raise CheckpointError(
            f"the MTP head in '{file.path}' is incomplete: it lacks {', '.join(lacking[:3])}. "
            f"{INSTEAD}."
        )
    return nextn


def _not_read(model_type: str | None) -> str | None:
    """The part of a family's heads that is not read; None: nothing is known."""
    return next(
        (what for family, what in MTP_NOT_READ.items() if (model_type or "").startswith(family)),
        None,
    )


# ------------------------------------------------ written


def save_mtp(
    head: MtpHead, folder: Path, num_layers: int, dtype: torch.dtype | None = None
) -> None:
    """A head of one layer for a target with `num_layers`, in the layout it was read from; weights
    as they are, or in `dtype`.

    Raises OSError when the disk is full.
    """
    layer = head.layer(0)
    layout = MTP_LAYOUTS[head.config.layout]
    blocks: Any = layer.body.layers
    parts = {part: getattr(layer, part) for part in (EMBED_NORM, HIDDEN_NORM, PROJECTION, NORM)}
    parts[BLOCK] = blocks if layout.is_stacked else blocks[0]
    number = num_layers if layout.counts_on else 0
    last = len(blocks) - 1
    tensors = {
        layout.written(f"{part}.{name}", number, last): tensor
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    config: dict[str, Any] = {"outrider": {"head": "mtp", "target": head.config.trained_for}}
    if head.config.max_position_embeddings is not None:
        config["max_position_embeddings"] = head.config.max_position_embeddings
    write_head(folder, "model.safetensors", config, tensors, dtype or head.dtype)
