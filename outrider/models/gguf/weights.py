"""Turns a GGUF file into transformers' module, and says what it weighs and what a person should
know of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from outrider.errors import CapabilityError, CheckpointError, first_line
from outrider.lazy import transformers
from outrider.models.gguf.config import DTYPES, gguf_generation_config, num_extra_layers
from outrider.models.gguf.experts import staying
from outrider.models.gguf.formats import panel_bytes
from outrider.models.gguf.header import GgufFile, TensorInfo
from outrider.models.gguf.linear import BlockExperts, block_layers, runs_on_kernels
from outrider.models.gguf.loading import GgufLoading, divide_frequencies, make_buffers
from outrider.models.gguf.packing import Packer, by_torch

BLOCK_0 = "blk.0."
BLOCK_NUMBER = re.compile(r"blk\.(\d+)\.")


def gguf_module(
    file: GgufFile,
    config: Any,
    dtype: torch.dtype,
    *,
    experts_stay: bool = True,
    pack: Packer = by_torch,
) -> nn.Module:
    """transformers' module with this checkpoint's weights, on the CPU; matrices in blocks stay in
    them (`linear.py`).

    `experts_stay`: those of experts, too. On a GPU they would be widened for each use, one expert
    at a time.

    Raises CheckpointError where weights are missing or of another shape, CapabilityError where the
    file has more than the architecture takes.
    """
    if any(".nextn." in tensor.name for tensor in file.tensors) and not any(
        BLOCK_0 in tensor.name for tensor in file.tensors
    ):
        raise CheckpointError(
            f"'{file.path}' holds an MTP head and no model. Use it with --draft, together with its target."
        )
    try:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CapabilityError(
            f"'{file.path}': transformers has no language model for it: {reason}"
        ) from error
    with torch.no_grad():
        make_buffers(module)
        loading = GgufLoading(
            own_layers(file, config),
            module,
            config,
            dtype,
            staying(file, experts=experts_stay),
            pack,
        )
        try:
            loading.run()
            divide_frequencies(module, file)
        except (ValueError, IndexError, RuntimeError) as error:
            reason = first_line(error)
            raise CheckpointError(
                f"'{file.path}' is damaged: its tensors have other shapes than it says ({reason})."
            ) from error
    module.outrider_stored = loading.stored
    module.generation_config = gguf_generation_config(file, config)
    return module


def gguf_bytes(
    file: GgufFile, config: Any, dtype: torch.dtype, *, experts_stay: bool = True
) -> tuple[int, int]:
    """Bytes of the weights once loaded: of plain ones, and of those that stay in blocks."""
    return tensor_bytes(
        own_layers(file, config).tensors, staying(file, experts=experts_stay), dtype
    )


def tensor_bytes(
    tensors: Sequence[TensorInfo], stay: Collection[str], dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes of tensors once loaded: of plain ones, and of those that `stay` in blocks."""
    plain = (
        sum(tensor.num_weights for tensor in tensors if tensor.name not in stay) * dtype.itemsize
    )
    in_blocks = [tensor for tensor in tensors if tensor.name in stay]
    return plain, sum(
        prod(tensor.shape[:-2]) * panel_bytes(tensor.kind, *tensor.shape[-2:])
        for tensor in in_blocks
    )


def gguf_notes(file: GgufFile, module: nn.Module, label: str) -> list[str]:
    """Notes for the user about a loaded checkpoint, a line each."""
    layers = list(block_layers(module))
    stay = staying(file, experts=any(isinstance(layer, BlockExperts) for layer in layers))
    notes = [blocks_note(file, label, on_kernels=runs_on_kernels(module))] if layers else []
    if widened := [
        tensor
        for tensor in file.tensors
        if tensor.kind.name not in DTYPES and tensor.name not in stay
    ]:
        counts = Counter(tensor.kind.name for tensor in widened)
        total = sum(tensor.num_weights for tensor in widened)
        kinds = ", ".join(f"{n} in {name}" for name, n in counts.items())
        notes.append(
            f"'{label}': tensors that no kernel multiplies in their blocks are widened ({kinds}; "
            f"{total / 1e6:.0f}M weights)"
        )
    return notes


def blocks_note(file: GgufFile, label: str, *, on_kernels: bool) -> str:
    """The note on weights that stay in blocks."""
    quantised = Counter(
        tensor.kind.name for tensor in file.tensors if tensor.kind.name not in DTYPES
    )
    kinds = ", ".join(name for name, _ in quantised.most_common())
    how = (
        "passes are in bfloat16 (llama.cpp's in fp32), and activations are rounded to 8 bits for each product, as llama.cpp "
        "does; --dtype float32 rounds neither, and is slow"
    )
    if not on_kernels:
        how = "the native kernels do not serve here (they take bfloat16 and a CPU with AVX2): slow"
    return f"'{label}' keeps its weights in their blocks ({kinds}); {how}"


def own_layers(file: GgufFile, config: Any) -> GgufFile:
    """The file without the layers that predict further tokens, which `models/heads/mtp_gguf.py`
    reads."""
    num_layers = config.get_text_config().num_hidden_layers
    has_extra = num_extra_layers(file) > 0

    def is_own(name: str) -> bool:
        number = BLOCK_NUMBER.match(name)
        return ".nextn." not in name and not (
            has_extra and number is not None and int(number[1]) >= num_layers
        )

    return replace(file, tensors=tuple(tensor for tensor in file.tensors if is_own(tensor.name)))
