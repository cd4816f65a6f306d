"""Checkpoints that see or hear besides: their text part is what runs. Whoever reads requests refuses pictures and sounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)


def auto_class(config: Any) -> Any:
    """transformers' loader for a config: that of language models, else that of models which take pictures with a text."""
    kind, own_code = type(config), getattr(config, "auto_map", None)
    only_mixed = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if only_mixed and not own_code else AutoModelForCausalLM


@torch.inference_mode()
def drop_other_senses(module: Any) -> list[str]:
    """Take out what a text never passes through (a vision tower, its projector); returns the names.

    Nothing of a plain language model, nor of one whose pass fails: the checks that follow tell why.
    """
    if module.config.get_text_config() is module.config:
        return []
    base = getattr(module, "model", module)
    parts = [(name, part) for name, part in base.named_children() if any(True for _ in part.parameters())]
    called: set[str] = set()
    hooks = [part.register_forward_pre_hook(lambda *_, name=name: called.add(name)) for name, part in parts]
    try:
        module(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device), use_cache=False)
    except Exception:  # noqa: BLE001  foreign code
        return []
    finally:
        for hook in hooks:
            hook.remove()
    unused = [name for name, part in parts if name not in called and not isinstance(part, nn.Embedding)]
    for name in unused:
        setattr(base, name, None)
    return unused
