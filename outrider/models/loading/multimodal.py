"""Checkpoints of multimodal models: only their text part runs. The server refuses pictures and
sounds in requests."""

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

TEXT_NAMES = {r"^(model\.)?language_model\.(model\.)?": "model."}  # of weights in a whole's files
SENSES = ("vision", "visual", "image", "audio")


def auto_classes(config: Any) -> list[Any]:
    """transformers' loaders for a config: of language models, then of ones that also take pictures
    or sounds (Emu3).

    Raises CapabilityError for a family that has neither there, such as Step 3.5.
    """
    kind = type(config)
    own_code = getattr(config, "auto_map", None)
    if own_code:
        return [transformers.AutoModelForCausalLM]
    loaders = [loader for mapping, loader in _loaders() if kind in mapping][:2]
    if not loaders:
        named = config.name_or_path or "the model"
        version = transformers.__version__
        raise CapabilityError(
            f"{named}: transformers {version} has no language model of model_type "
            f"'{config.model_type}'."
        )
    return loaders


def _loaders() -> list[tuple[Any, Any]]:
    return [
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (
            transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            transformers.AutoModelForImageTextToText,
        ),
        (transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING, transformers.AutoModelForMultimodalLM),
    ]


def loaded(kind: Any, name: str, config: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model by one of transformers' loaders, and its report of the weights.

    Where the whole takes a package that is not here (timm, for the vision tower of Gemma 3n), the
    language model inside it alone.
    """
    try:
        result: tuple[Any, dict[str, Any]] = kind.from_pretrained(
            name, config=config, output_loading_info=True, **options
        )
    except ImportError:
        text = config.get_text_config()
        if text is config or type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise
        alone = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        if text.eos_token_id is None:
            text.eos_token_id = config.eos_token_id
        result = alone.from_pretrained(
            name, config=text, key_mapping=TEXT_NAMES, output_loading_info=True, **options
        )
    return result


def text_part(module: Any) -> Any:
    """The language model inside a model that takes pictures, too; a plain language model as it is.

    It is the whole one that some are built around, or of transformers' class for it, else the whole
    model without what a text never passes through.
    """
    config = module.config
    if config.get_text_config() is config:
        also_senses = any(
            getattr(config, name, None) is not None for name in ("vision_config", "audio_config")
        )  # Phi 4's
        return _without_other_senses(module) if also_senses else module
    if (inner := _inner(module)) is not None and _has_its_logits(inner, module):
        return text_part(_with_ends(inner, module))
    alone = _alone(module)
    return (
        alone
        if alone is not None and _has_its_logits(alone, module)
        else _without_other_senses(module)
    )


def _inner(module: Any) -> Any | None:
    """The part that is a language model with its output layer (Nemotron 3 Omni, BLIP-2); None where
    there is none.

    Raises CapabilityError where that part is an encoder-decoder.
    """
    kind = type(module.config.get_text_config())
    for part in module.children():
        is_model = (
            isinstance(part, transformers.PreTrainedModel)
            and type(part.config.get_text_config()) is kind
        )
        if is_model and part.can_generate() and part.get_output_embeddings() is not None:
            if getattr(part.config, "is_encoder_decoder", False):
                raise CapabilityError(
                    f"{module.name_or_path} ({module.config.model_type}): its language model "
                    f"({part.config.model_type}) is an "
                    "encoder-decoder; a decoder-only model is needed."
                )
            return part
    return None


def _with_ends(part: Any, module: Any) -> Any:
    """A part that knows how its whole generates, and which tokens end a text."""
    part.generation_config = module.generation_config
    if part.config.eos_token_id is None:
        part.config.eos_token_id = getattr(module.config, "eos_token_id", None)
    return part.eval()


def _alone(module: Any) -> Any | None:
    """transformers' language model of this kind around the weights; None where there is none, or it
    is made of other parts."""
    text = module.config.get_text_config()
    inner = getattr(getattr(module, "model", None), "language_model", None)
    if inner is None or type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with torch.device("meta"):
        alone = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)](text)
    outer = {name for name, _ in alone.named_children()}
    if type(alone.base_model) is not type(inner) or outer != {alone.base_model_prefix, "lm_head"}:
        return None
    setattr(alone, alone.base_model_prefix, inner)
    alone.lm_head = module.lm_head
    return _with_ends(alone, module)


@torch.inference_mode()
def _has_its_logits(alone: Any, module: Any) -> bool:
    """Whether a language model has the logits of the model that it is a part of, which may not
    scale them (Aya Vision).

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
        logits = alone(input_ids=tokens, use_cache=False).logits
        dtype = alone.lm_head.weight.dtype
    return difference(logits, whole, dtype, picks_experts=has_experts(alone.config)) <= tolerance(
        dtype
    )


@contextmanager
def _one_layer(decoder: Any) -> Iterator[None]:
    """A decoder has only its first layer meanwhile, unless its layers are elsewhere than most have
    them."""
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
    """The model without vision towers, projectors and experts for pictures: parts that a pass over
    a text did not call."""
    named = {
        name: part for name, part in module.named_modules() if any(True for _ in part.parameters())
    }
    called: set[str] = set()
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, part in named.items()
    ]
    try:
        module(
            input_ids=torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device),
            use_cache=False,
        )
    except Exception:  # noqa: BLE001  foreign code: the checks that follow will tell
        return module
    finally:
        for hook in hooks:
            hook.remove()
    for name, part in named.items():
        # nor is any part of it called
        is_silent = not any(f"{call_args}.".startswith(f"{name}.") for call_args in called)
        if is_silent and _may_be_left_out(name) and not isinstance(part, nn.Embedding):
            owner, _, last = name.rpartition(".")
            setattr(named[owner], last, None)
    return module


def _may_be_left_out(name: str) -> bool:
    """Whether a part is one of the whole's own, or is named after another sense deeper within
    (ERNIE's experts for pictures)."""
    name = name.removeprefix("model.")
    return bool(name) and (
        "." not in name or any(word in name.rpartition(".")[2] for word in SENSES)
    )
