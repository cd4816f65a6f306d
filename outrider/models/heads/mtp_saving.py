"""MTP heads written down: a folder with nothing but the head, in the layout that it was read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.models.heads.mtp import MtpHead
from outrider.models.heads.mtp_layout import BLOCK, EMBED_NORM, HIDDEN_NORM, NORM, PROJECTION
from outrider.models.heads.tensors import write_head

PARTS = (EMBED_NORM, HIDDEN_NORM, PROJECTION, NORM, BLOCK)
NAMES = {  # of these, in order; {n}: number of layers of the target; {last}: the last block of several
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0"),
    "deepseek": tuple(f"model.layers.{{n}}{part}" for part in (".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")),
    "mimo": tuple(
        f"model.mtp_layers.0{part}" for part in (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")
    ),
    "megatron": tuple(f"model.mtp.layers.0{part}" for part in (".enorm", ".hnorm", ".eh_proj", ".final_layernorm", "")),
    "nemotron": (
        *(f"mtp.layers.0.{part}" for part in ("enorm", "hnorm", "eh_proj")), "mtp.layers.{last}.final_layernorm", "mtp.layers"
    ),
    "ernie": (*(f"model.mtp_{part}.0" for part in ("emb_norm", "hidden_norm", "linear_proj")), "model.norm", "model.mtp_block.0"),
}


def save_mtp(head: MtpHead, folder: Path, num_layers: int, dtype: torch.dtype | None = None) -> None:
    """A head of one layer for a target with `num_layers`; weights as they are, or in `dtype`.

    Raises OSError when the disk is full.
    """
    layer, tensors = head.layer(0), dict[str, Tensor]()
    body: Any = layer.body
    for part, name in zip(PARTS, NAMES[head.config.layout], strict=True):
        module = getattr(layer, part) if part != BLOCK else body.layers if name == "mtp.layers" else body.layers[0]
        named = name.format(n=num_layers, last=len(body.layers) - 1)
        tensors |= {f"{named}.{own}": tensor for own, tensor in module.state_dict().items()}
    config: dict[str, Any] = {"outrider": {"head": "mtp", "target": head.config.trained_for}}
    if head.config.max_position_embeddings is not None:
        config["max_position_embeddings"] = head.config.max_position_embeddings
    write_head(folder, "model.safetensors", config, tensors, dtype or head.dtype)
