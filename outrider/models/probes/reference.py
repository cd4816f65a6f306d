"""What a model of transformers says itself: its passes with the inputs that `generate` gives them, without a cache.

`generate` counts positions from 0. RoBERTa and its relatives count otherwise where they are given none.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.lazy import transformers


def plain_logits(module: Any, ids: Tensor) -> Tensor:
    """Logits (B, T, V) of one pass over texts (B, T)."""
    inputs = _inputs(module, ids)
    if inputs["input_ids"].shape != ids.shape:
        inputs = {"input_ids": ids, "use_cache": False, **_positions(module, ids)}
    inputs.pop("logits_to_keep", None)  # the last one: all that `generate` wants of Falcon H1, Bamba, Zamba and Nemotron-H
    return module(**inputs).logits


def next_logits(module: Any, text: Sequence[int]) -> Tensor:
    """Logits (1, V) of the token behind a text, as `generate` finds them without a cache.

    Some models are made ready otherwise than by a pass over the text: they read a mask behind it (XLM, XLNet).
    """
    ids = torch.tensor([list(text)], device=next(module.parameters()).device)
    return module(**_inputs(module, ids)).logits[:, -1]


def writes_otherwise(module: Any) -> bool:
    """Whether the model has a `generate` of its own, which may do anything."""
    return getattr(type(module), "generate", None) not in (None, transformers.GenerationMixin.generate)


def takes_positions(module: Any) -> bool:
    """Whether `generate` tells the model the positions of tokens."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device)
    return _inputs(module, ids).get("position_ids") is not None


def _inputs(module: Any, ids: Tensor) -> dict[str, Any]:
    """What `generate` calls the model with for these texts. A checkpoint's own class may not generate."""
    options = {"use_cache": False, **_positions(module, ids)}
    if not hasattr(module, "prepare_inputs_for_generation"):
        return {"input_ids": ids, **options}
    return module.prepare_inputs_for_generation(ids, is_first_iteration=True, **options)


def _positions(module: Any, ids: Tensor) -> dict[str, Tensor]:
    """The argument of that name, where the code takes one and `generate` makes it (not for Reformer)."""
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return {}
    make = getattr(module, "_prepare_position_ids_for_generation", None)
    if make is None:
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)}
    made = make(ids, {"attention_mask": torch.ones_like(ids)})
    return {} if made is None else {"position_ids": made}
