"""EAGLE heads as other engines read them.

    raw            the original layout: vLLM, SGLang and EAGLE's own code (`LlamaForCausalLMEagle3`, `EagleLlamaForCausalLM`)
    speculators    vLLM's own library: names its target, so that `vllm serve FOLDER` alone finds it. EAGLE-3 only
    fp8            the original layout in 8 bits and without the target's tables, for Outrider alone: a fraction of the size

Every flag is written out, since readers disagree about what a missing one means. With `tables` the
folder also holds the target's embedding, and its output layer where the head has none of its own:
some readers compare, some insist.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError, did_you_mean
from outrider.models.derived.derive import weight_of
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.eagle_files import (
    flags,
    head_tensors,
    layer_config,
    raw_config,
    raw_tensors,
)
from outrider.models.heads.source import in_fp8, write_head

FP8 = "fp8"
LAYOUTS = ("raw", "speculators", FP8)
SPECULATORS_VERSION = "0.3.0"  # whose fields these are


def export_eagle(
    head: EagleHead,
    folder: Path,
    layout: str,
    *,
    tables: bool = True,
    num_draft_tokens: int = 5,
    architectures: Sequence[str] = (),
) -> None:
    """Write the folder; `head` must be bound to its target where tables are shared.
    `architectures`: the target's, which speculators' layout names.

    Raises ConfigError for a layout that cannot hold this head, OSError when the disk is full.
    """
    if layout not in LAYOUTS:
        raise ConfigError(
            f"unknown layout '{layout}' of an EAGLE head.{did_you_mean(layout, LAYOUTS)}"
        )
    if layout == FP8:
        write_head(folder, "model.safetensors", raw_config(head), in_fp8(raw_tensors(head)))
        return
    if layout == "raw":
        write_head(
            folder, "model.safetensors", raw_config(head), raw_tensors(head) | _shared(head, tables)
        )
        return
    if head.config.kind != "eagle3":
        raise ConfigError("speculators' layout is for EAGLE-3 heads; export this one as 'raw'")
    config = speculators_config(head, num_draft_tokens, architectures)
    write_head(folder, "model.safetensors", config, head_tensors(head) | _shared(head, tables))


def speculators_config(
    head: EagleHead, num_draft_tokens: int, architectures: Sequence[str] = ()
) -> dict[str, Any]:
    """config.json of speculators' layout."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    mask_token = head.config.mask_token
    algorithm = "eagle3" if mask_token is None else "peagle"
    return {
        "architectures": ["Eagle3Speculator" if mask_token is None else "PEagleSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
        **flags(head),
        **({} if mask_token is None else {"mask_token_id": mask_token}),
        "logit_scale": head.config.logit_scale,
        "transformer_layer_config": layer_config(head),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": head.config.trained_for,
                "architectures": list(architectures),
            },
        },
    }


def _shared(head: EagleHead, tables: bool) -> dict[str, Tensor]:
    """The target's tables, where the head has none of its own. An EAGLE-3 layout always needs an
    output layer."""
    config = head.config
    tensors = {}
    if tables and not config.own_embedding:
        tensors["embed_tokens.weight"] = _like(head, head.embedding)
    if not config.own_output and config.kind == "eagle3":
        tensors["lm_head.weight"] = _like(head, weight_of(head.output))
    return tensors


def _like(head: EagleHead, table: Tensor) -> Tensor:
    with torch.no_grad():
        return table.detach().to(head.dtype)
