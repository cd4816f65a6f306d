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
    return module(input_ids=ids, use_cache=False, **_positions(module, ids)).logits


def next_logits(module: Any, text: Sequence[int]) -> Tensor:
    """Logits (1, V) of the token behind a text, as `generate` finds them without a cache.

    Some models are made ready otherwise than by a pass over the text: they read a mask behind it (XLM, XLNet).
    """
    ids = torch.tensor([list(text)], device=next(module.parameters()).device)
    inputs = module.prepare_inputs_for_generation(ids, is_first_iteration=True, use_cache=False)
    if inputs["input_ids"].shape == ids.shape:
        inputs |= _positions(module, ids)
    return module(**inputs).logits[:, -1]


def writes_otherwise(module: Any) -> bool:
    """Whether the model has a `generate` of its own, which may do anything."""
    return type(module).generate is not transformers.GenerationMixin.generate


def takes_positions(module: Any) -> bool:
    """Whether `generate` tells the model the positions of tokens."""
    return bool(_positions(module, torch.zeros(1, 2, dtype=torch.int64)))


def _positions(module: Any, ids: Tensor) -> dict[str, Tensor]:
    """The argument of that name, where the code takes one and `generate` gives it (not to Reformer)."""
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return {}
    make = getattr(module, "_prepare_position_ids_for_generation", None)
    if make is None:  # a checkpoint's own class, which does not generate
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)}
    made = make(ids, {"attention_mask": torch.ones_like(ids)})
    return {} if made is None else {"position_ids": made}
