"""Medusa heads on disk: two published layouts in, the same two out.

    original    {head}.{block}.linear.weight, .bias    {head}.{blocks}.weight     Medusa's medusa_lm_head.pt, also safetensors
    vllm        blocks.{head}.layers.{block}.weight    lm_heads.{head}.weight     vLLM's MedusaModel; token_map for a reduced
                                                                                  vocabulary

Heads are counted in the file: configs on the hub say 2 where 5 are stored. Ours is the original layout as safetensors, with what
it has no word for under "outrider" in config.json.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CheckpointError, ConfigError, did_you_mean
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads
from outrider.models.heads.tensors import HeadTensors, write_head

KIND = "Medusa heads"
PREFIXES = ("medusa_heads.", "medusa_head.", "model.")


def load_medusa(folder: Path | str, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Heads for a target with these sizes, still to be bound to it. Raises CheckpointError when they do not fit it."""
    heads, weights = _fitted(HeadTensors.read(folder), hidden_size, vocab_size, "cpu")
    heads.load_state_dict(weights)
    return heads.eval().requires_grad_(False)


def outline_medusa(folder: Path | str, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Heads without their weights (on torch's meta device): how many and how large, before anything is loaded. Raises as
    `load_medusa`."""
    return _fitted(HeadTensors.outline(folder), hidden_size, vocab_size, "meta")[0]


def _fitted(files: HeadTensors, hidden_size: int, vocab_size: int, device: str) -> tuple[MedusaHeads, dict[str, Tensor]]:
    """Fresh heads of these files on `device`, and what belongs into them."""
    for prefix in PREFIXES:
        files.rename(prefix)
    names = files.names
    with files.making(KIND):
        if any(re.match(r"\d+\.\d+\.", name) for name in names):
            config, tensors = _read_original(files, hidden_size, vocab_size)
        elif any(name.startswith("blocks.") for name in names):
            config, tensors = _read_vllm(files, hidden_size, vocab_size)
        else:
            raise CheckpointError(f"{files.what()} holds no {KIND}: it has {', '.join(sorted(names)[:6])}")
    files.finish(KIND)
    own = files.config.get("outrider") or {}
    with files.making(KIND), torch.device(device):
        accuracies = tuple(tuple(float(value) for value in line) for line in own.get("accuracies", ()))
        heads = MedusaHeads(replace(config, accuracies=accuracies), tensors.pop("token_ids", None))
    return heads, tensors


def save_medusa(heads: MedusaHeads, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Our layout: the original one (vLLM's for a reduced vocabulary); weights as they are, or in `dtype`. Raises OSError when
    the disk is full."""
    if heads.token_ids is not None:
        return write_head(folder, "model.safetensors", _vllm_config(heads), _vllm_tensors(heads), dtype)
    tensors = _original_tensors(heads, heads.config.own_output)
    write_head(folder, "medusa_lm_head.safetensors", _original_config(heads), tensors, dtype)


def export_medusa(heads: MedusaHeads, folder: Path, layout: str) -> None:
    """The heads as other engines read them: "original" (medusa_lm_head.pt) or "vllm". Output layers that are the target's are
    written out. Raises ConfigError for another layout, or heads with a reduced vocabulary in the original one."""
    if layout == "vllm":
        write_head(folder, "model.safetensors", _vllm_config(heads), _vllm_tensors(heads))
    elif layout == "original":
        if heads.token_ids is not None:
            raise ConfigError("the original Medusa layout has no reduced vocabulary; export these heads as 'vllm'")
        write_head(folder, "medusa_lm_head.safetensors", _original_config(heads), _original_tensors(heads, True))
        torch.save(_original_tensors(heads, True), folder / "medusa_lm_head.pt")
    else:
        raise ConfigError(f"unknown layout '{layout}' of {KIND}.{did_you_mean(layout, ['original', 'vllm'])}")


# ---------------------------------------------------------------- reading


def _read_original(files: HeadTensors, hidden: int, vocab: int) -> tuple[MedusaConfig, dict[str, Tensor]]:
    numbers = [match.groups() for name in files.names if (match := re.match(r"(\d+)\.(\d+)\.(linear\.)?", name))]
    num_heads = 1 + max(int(head) for head, _, _ in numbers)
    num_layers = 1 + max((int(layer) for _, layer, linear in numbers if linear), default=-1)
    bias = "0.0.linear.bias" in files
    own_output = f"0.{num_layers}.weight" in files
    if not own_output and (files.config.get("outrider") or {}).get("output") != "target":
        raise CheckpointError(f"{files.what()} lacks tensor '0.{num_layers}.weight', the output layer of its first head")
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"heads.{head}.layers.{layer}.weight"] = files.take(f"{head}.{layer}.linear.weight", hidden, hidden)
            if bias:
                tensors[f"heads.{head}.layers.{layer}.bias"] = files.take(f"{head}.{layer}.linear.bias", hidden)
        if own_output:
            tensors[f"heads.{head}.output.weight"] = files.take(f"{head}.{num_layers}.weight", vocab, hidden)
    config = MedusaConfig(
        hidden, vocab, num_heads, num_layers, bias=bias, own_output=own_output, trained_for=files.trained_for
    )
    return config, tensors


def _read_vllm(files: HeadTensors, hidden: int, vocab: int) -> tuple[MedusaConfig, dict[str, Tensor]]:
    numbers = [match.groups() for name in files.names if (match := re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", name))]
    num_heads, num_layers = (1 + max(int(pair[i]) for pair in numbers) for i in (0, 1))
    bias = "blocks.0.layers.0.bias" in files
    shared = bool(files.config.get("original_lm_head")) or "lm_heads.1.weight" not in files
    tensors = {}
    rows = vocab
    if "token_map" in files:
        rows = files.shape("token_map")[0]
        tensors["token_ids"] = files.take("token_map", rows).long()
        _check_ids(files, tensors["token_ids"], vocab)
    num_outputs = 1 if shared else num_heads
    outputs = [files.take(f"lm_heads.{i}.weight", _stored(files, i, rows, vocab), hidden) for i in range(num_outputs)]
    if rows != vocab:  # a full head is cut to the rows that the map names
        outputs = [weight[tensors["token_ids"]] if weight.shape[0] == vocab else weight for weight in outputs]
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"heads.{head}.layers.{layer}.weight"] = files.take(f"blocks.{head}.layers.{layer}.weight", hidden, hidden)
            if bias:
                tensors[f"heads.{head}.layers.{layer}.bias"] = files.take(f"blocks.{head}.layers.{layer}.bias", hidden)
        tensors[f"heads.{head}.output.weight"] = outputs[0 if shared else head]
    config = MedusaConfig(
        hidden, vocab, num_heads, num_layers, bias=bias, draft_vocab_size=None if rows == vocab else rows,
        logit_scale=float(files.config.get("logit_scale", 1.0)), trained_for=files.trained_for,
    )  # fmt: skip
    return config, tensors


def _stored(files: HeadTensors, head: int, rows: int, vocab: int) -> int:
    """Rows of an output layer as it is stored: with a map it may be whole, or cut already."""
    found = files.shape(f"lm_heads.{head}.weight")[0]
    return found if found in (rows, vocab) else rows


def _check_ids(files: HeadTensors, ids: Tensor, vocab: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise CheckpointError(f"{files.what()}: token_map names token {int(ids.max())}, the target has {vocab} tokens")


# ---------------------------------------------------------------- writing


def _original_config(heads: MedusaHeads) -> dict[str, Any]:
    config = heads.config
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": config.trained_for,
        "hidden_size": config.hidden_size,  # Medusa's code asks the target; vLLM would take 4096, and 32001 tokens
        "vocab_size": config.vocab_size,
        "medusa_fc_bias": config.bias,
        "outrider": {
            "head": "medusa",
            "target": config.trained_for,
            "output": "own" if config.own_output else "target",
            "accuracies": [list(line) for line in config.accuracies],
        },
    }


def _original_tensors(heads: MedusaHeads, outputs: bool) -> dict[str, Tensor]:
    found = {}
    for index, head in enumerate(heads.parts):
        for layer, linear in enumerate(head.layers):
            found[f"{index}.{layer}.linear.weight"] = linear.weight
            if linear.bias is not None:
                found[f"{index}.{layer}.linear.bias"] = linear.bias
        if outputs:
            found[f"{index}.{len(head.layers)}.weight"] = heads.output_weight(index) * heads.config.logit_scale
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def _vllm_config(heads: MedusaHeads) -> dict[str, Any]:
    config = heads.config
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size or config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": not config.own_output,
        "logit_scale": config.logit_scale,
        "torch_dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        "outrider": {"head": "medusa", "target": config.trained_for, "accuracies": [list(line) for line in config.accuracies]},
    }


def _vllm_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    found = {}
    for index, head in enumerate(heads.parts):
        for layer, linear in enumerate(head.layers):
            found[f"blocks.{index}.layers.{layer}.weight"] = linear.weight
            if linear.bias is not None:
                found[f"blocks.{index}.layers.{layer}.bias"] = linear.bias
        if heads.config.own_output or index == 0:
            found[f"lm_heads.{index}.weight"] = heads.output_weight(index)
    if heads.token_ids is not None:
        found["token_map"] = heads.token_ids
    return found
