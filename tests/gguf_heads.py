"""GGUF files with an MTP head, written as llama.cpp's converter would from what `tests/mtp_heads.py` makes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gguf_files import Kind, rounded, stored_tensors, write_model
from tests.mtp_heads import MtpReference

PARTS = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "shared_head_norm": "norm"}
RAISED = ("qwen35", "qwen35moe", "qwen3next")  # norms, by one
PLAIN = ("norm", "ffn_gate_inp", "ssm_", "attn_k_b", "attn_v_b", "attn_qkv", "attn_gate", "exp_probs_b")  # tensors that stay fp32
ROUTERS = ("gate.weight", "shared_expert_gate.weight", "kv_b_proj.weight")


def round_matrices(module: Any, kind: Kind) -> None:
    """Round what `kind_of` stores in blocks, in place."""
    for name, value in module.named_parameters():
        if value.ndim > 1 and value.shape[-1] % 32 == 0 and not name.endswith(ROUTERS) and ".linear_attn." not in name:
            value.data.copy_(rounded(value.data.contiguous(), kind))


def write_with_head(
    path: Path, reference: MtpReference, head: Mapping[str, np.ndarray], architecture: str, *, kind: Kind = Kind.F32,
    changes: Mapping[str, Any] | None = None, tensors: Mapping[str, np.ndarray] | None = None, leave_out: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """The target of a reference with the tensors of its head. `tensors`: more of the target's."""
    count, num_layers = reference.target.config.num_hidden_layers, len(reference.layers)
    metadata = {f"{architecture}.block_count": count + num_layers, f"{architecture}.nextn_predict_layers": num_layers}
    kept = {name: value for name, value in {**(tensors or {}), **head}.items() if name not in leave_out}
    return write_model(
        path, reference.target, architecture, changes={**metadata, **(changes or {})}, tensors=kept, leave_out=leave_out,
        kind=lambda name: Kind.F32 if any(part in name for part in PLAIN) else kind,
    )  # fmt: skip


def head_tensors(reference: MtpReference, donors: Sequence[Any], architecture: str) -> dict[str, np.ndarray]:
    """A head's tensors by GGUF's names."""
    count = reference.target.config.num_hidden_layers
    found: dict[str, np.ndarray] = {}
    for index, (donor, parts) in enumerate(zip(donors, reference.layers, strict=True)):
        last = donor.config.num_hidden_layers - 1
        for name, value in stored_tensors(donor, architecture).items():
            if own := re.fullmatch(rf"blk\.{last}\.(.+)", name):
                found[f"blk.{count + index}.{own[1]}"] = value
        found |= parts_of_layer(parts, count + index, architecture)
    return found


def parts_of_layer(parts: Mapping[str, Any], block: int, architecture: str) -> dict[str, np.ndarray]:
    """Norms and projection of a layer."""
    found: dict[str, np.ndarray] = {}
    for theirs, ours in PARTS.items():
        weight = parts[ours].weight.detach().float()
        raised = architecture in RAISED and theirs != "eh_proj"
        found[f"blk.{block}.nextn.{theirs}.weight"] = (weight + 1 if raised else weight).numpy()
    return found


def zeros_of_copies(reference: MtpReference, block: int) -> dict[str, np.ndarray]:
    """Copies of the target's tables, which nobody reads."""
    shape = tuple(reference.target.get_input_embeddings().weight.shape)
    return {f"blk.{block}.nextn.{name}.weight": torch.zeros(shape).numpy() for name in ("embed_tokens", "shared_head_head")}
