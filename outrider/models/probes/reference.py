"""A transformers model's own answers: passes without a cache, on the inputs that `generate` gives
them.

`generate` counts positions from 0. RoBERTa and its relatives count otherwise where they are given
none.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from outrider.lazy import transformers


def plain_logits(module: Any, ids: Tensor) -> Tensor:
    """Logits (B, T, V) of one pass over texts (B, T)."""
    inputs = _inputs(module, ids)
    inputs.pop("logits_to_keep", None)  # the last one is all that `generate` wants of some models
    return module(**inputs).logits[:, : ids.shape[1]]


def next_logits(module: Any, ids: Tensor) -> Tensor:
    """Logits (B, V) of the next token of texts (B, T), as `generate` finds them: some models read a
    mask after the text."""
    return module(**_inputs(module, ids)).logits[:, -1]


def writes_otherwise(module: Any) -> bool:
    """Whether the model has a `generate` of its own, which may do anything."""
    return getattr(type(module), "generate", None) not in (
        None,
        transformers.GenerationMixin.generate,
    )


def takes_positions(module: Any) -> bool:
    """Whether `generate` tells the model the positions of tokens."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device)
    return _inputs(module, ids).get("position_ids") is not None


def _inputs(module: Any, ids: Tensor) -> dict[str, Any]:
    """The arguments that `generate` passes to the model for these texts. A checkpoint's own class
    may not generate."""
    options: dict[str, Any] = {"use_cache": False}
    if "position_ids" in inspect.signature(module.forward).parameters:
        options["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    if not hasattr(module, "prepare_inputs_for_generation"):
        return {"input_ids": ids, **options}
    return module.prepare_inputs_for_generation(ids, is_first_iteration=True, **options)
