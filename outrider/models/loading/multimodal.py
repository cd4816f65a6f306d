"""Checkpoints of multimodal models: only their text part runs. The server refuses pictures and sounds in requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outrider.errors import CapabilityError
from outrider.lazy import transformers
from outrider.models.probes.probe import difference, probe_tokens, tolerance
from outrider.models.quantised.scheme import has_experts


def auto_classes(config: Any) -> list[Any]:
    """transformers' loaders for a config: of language models, then of models that take pictures, too (Emu3 is saved as these).

    Raises CapabilityError for a family that has neither there, such as Step 3.5.
    """
    kind, own_code = type(config), getattr(config, "auto_map", None)
    mixed, plain = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if kind not in mixed and kind not in plain and not own_code:
        named, version = config.name_or_path or "the model", transformers.__version__
        raise CapabilityError(f"{named}: transformers {version} has no language model of model_type '{config.model_type}'.")
    if kind not in mixed or own_code:
        return [transformers.AutoModelForCausalLM]
    return [transformers.AutoModelForCausalLM] * (kind in plain) + [transformers.AutoModelForImageTextToText]


def text_part(module: Any) -> Any:
    """The language model inside a model that takes pictures, too; a plain language model as it is.

    It is of transformers' class for it, else the whole model without what a text never passes through.
    """
    if module.config.get_text_config() is module.config:
        return module
    alone = _alone(module)
    return alone if alone is not None and _has_its_logits(alone, module) else _without_other_senses(module)


def _alone(module: Any) -> Any | None:
    """transformers' language model of this kind around the weights; None where there is none, or it is made of other parts."""
    text, inner = module.config.get_text_config(), getattr(getattr(module, "model", None), "language_model", None)
    if inner is None or type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with torch.device("meta"):
        alone = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)](text)
    outer = {name for name, _ in alone.named_children()}
    if type(alone.base_model) is not type(inner) or outer != {alone.base_model_prefix, "lm_head"}:
        return None
    setattr(alone, alone.base_model_prefix, inner)
    alone.lm_head = module.lm_head
    alone.generation_config = module.generation_config
    if text.eos_token_id is None:
        text.eos_token_id = module.config.eos_token_id
    return alone.eval()


@torch.inference_mode()
def _has_its_logits(alone: Any, module: Any) -> bool:
    """Whether a language model has the logits of the model that it is a part of, which may not scale them (Aya Vision).

    They share their layers, so the first one alone tells.
    """
    tokens = probe_tokens(alone.config.vocab_size, 8, next(module.parameters()).device)
    with _one_layer(alone.base_model):
        try:
            whole = module(input_ids=tokens, use_cache=False).logits
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001  code that takes no text without a picture
            return True
        own, dtype = alone(input_ids=tokens, use_cache=False).logits, alone.lm_head.weight.dtype
    return difference(own, whole, dtype, picks_experts=has_experts(alone.config)) <= tolerance(dtype)


@contextmanager
def _one_layer(decoder: Any) -> Iterator[None]:
    """A decoder has only its first layer meanwhile, unless its layers are elsewhere than most have them."""
    layers = getattr(decoder, "layers", None)
    if layers is not None:
        decoder.layers = layers[:1]
    try:
        yield
    finally:
        if layers is not None:
            decoder.layers = layers


@torch.inference_mode()
def _without_other_senses(module: Any) -> Any:
    """The model without vision towers and projectors: parts that a pass over a text did not call."""
    base = getattr(module, "model", module)
    parts = [(name, part) for name, part in base.named_children() if any(True for _ in part.parameters())]
    called: set[str] = set()
    hooks = [part.register_forward_pre_hook(lambda *_, name=name: called.add(name)) for name, part in parts]
    try:
        module(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device), use_cache=False)
    except Exception:  # noqa: BLE001  foreign code: the checks that follow will tell
        return module
    finally:
        for hook in hooks:
            hook.remove()
    for name, part in parts:
        if name not in called and not isinstance(part, nn.Embedding):
            setattr(base, name, None)
    return module
