"""New small models in the image of a target: some of its layers, or its architecture in other sizes
with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.errors import CapabilityError, ConfigError, first_line
from outrider.models.signals import decoder_layers


def chosen_layers(text: str, count: int, owner: str) -> list[int]:
    """'3' = three of `count` layers spread evenly, the first and the last among them; '0,2,7' =
    these. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(
            f"{owner}: init_layers is a number like 3 or a list like 0,2,7; got '{text}'"
        )
    numbers = [int(word) for word in words]
    if len(numbers) == 1 and "," not in text:
        if not 1 <= numbers[0] <= count:
            raise ConfigError(
                f"{owner}: init_layers must be between 1 and {count}, the target's layers; got "
                f"{numbers[0]}"
            )
        if numbers[0] == 1:
            return [0]
        return [round(number * (count - 1) / (numbers[0] - 1)) for number in range(numbers[0])]
    if numbers != sorted(set(numbers)) or numbers[-1] >= count:
        raise ConfigError(
            f"{owner}: init_layers must be rising numbers of layers 0..{count - 1}, got '{text}'"
        )
    return numbers


def thinned_model(target: Any, text: str, owner: str) -> Any:
    """A model of some of the target's layers, everything else copied, in fp32. Raises ConfigError,
    CapabilityError."""
    layers = decoder_layers(target)
    layers_kept = chosen_layers(text.rstrip(","), len(layers), owner)
    path = next(name for name, part in target.named_modules() if part is layers)
    config = _with_layers(target.config, layers_kept, len(layers))
    module = AutoModelForCausalLM.from_config(config).float()
    new_number = {str(old): new for new, old in enumerate(layers_kept)}

    def renamed(name: str) -> str | None:
        """The new name of a tensor or of a part with a point after it; None: of a layer that is
        left out."""
        if not name.startswith(f"{path}."):
            return name
        old, _, rest = name.removeprefix(f"{path}.").partition(".")
        return f"{path}.{new_number[old]}.{rest}" if old in new_number else None

    state = _plain_tensors(target, renamed)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        differing = sorted(set(state) ^ set(module.state_dict())) or [first_line(error)]
        few = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
        raise CapabilityError(
            f"{owner}: layers of {target.config.model_type} cannot be copied as they are stored "
            f"({few}); begin with a model of "
            'your own (--init), or with random weights ("draft-model hidden_size=...")'
        ) from error
    return module


def _plain_tensors(module: Any, renamed: Callable[[str], str | None]) -> dict[str, Tensor]:
    """A model's tensors in fp32 by new name, weights in blocks as plain copies; without those that
    get no name."""
    packed: dict[str, Any] = {}
    for path, part in module.named_modules():
        if isinstance(getattr(type(part), "weight", None), property) and not path.startswith(
            tuple(packed)
        ):
            packed[f"{path}."] = part
    plain = {
        name: tensor
        for name, tensor in module.state_dict().items()
        if not name.startswith(tuple(packed))
    }
    tensors = {
        new: tensor.float() for name, tensor in plain.items() if (new := renamed(name)) is not None
    }
    for prefix, part in packed.items():
        if (new := renamed(prefix)) is not None:
            tensors[f"{new}weight"] = part.weight.float()
            tensors |= (
                {} if getattr(part, "bias", None) is None else {f"{new}bias": part.bias.float()}
            )
    return tensors


def scratch_model(target: Any, sizes: dict[str, int], owner: str) -> Any:
    """The target's architecture in other sizes, random weights in fp32. Raises ConfigError when the
    sizes do not fit."""
    old = target.config.get_text_config()
    heads = sizes.get("num_heads") or max(1, old.num_attention_heads // 2)
    hidden = sizes.get("hidden_size") or max(heads * 8, old.hidden_size // 2 // heads * heads)
    if hidden % heads or (hidden // heads) % 2:
        raise ConfigError(
            f"{owner}: hidden_size {hidden} must be an even multiple of num_heads {heads}"
        )
    num_layers = sizes.get("num_layers") or max(1, old.num_hidden_layers // 4)
    layers_kept = [min(number, old.num_hidden_layers - 1) for number in range(num_layers)]
    config = _with_layers(target.config, layers_kept, old.num_hidden_layers)
    inner = config.get_text_config()
    inner.hidden_size = hidden
    inner.num_attention_heads = heads
    inner.intermediate_size = sizes.get("intermediate_size") or max(
        hidden, getattr(old, "intermediate_size", 4 * hidden) // 2
    )
    if getattr(old, "num_key_value_heads", None):
        inner.num_key_value_heads = next(
            n for n in range(min(heads, old.num_key_value_heads), 0, -1) if heads % n == 0
        )
    if getattr(inner, "head_dim", None) is not None:
        inner.head_dim = hidden // heads
    try:
        module: Any = AutoModelForCausalLM.from_config(config).float()
        module(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except Exception as error:
        raise ConfigError(
            f"{owner}: {old.model_type} cannot be built in these sizes ({error}); give other ones"
        ) from error
    return module


def _with_layers(config: Any, layers_kept: list[int], count: int) -> Any:
    """The config for these layers: their number, and what it lists for each layer (kinds of
    attention, ...)."""
    config = copy.deepcopy(config)
    inner = config.get_text_config()
    for name, value in inner.to_dict().items():
        if isinstance(value, list) and len(value) == count:
            setattr(inner, name, [value[layer] for layer in layers_kept])
    inner.num_hidden_layers = len(layers_kept)
    config.dtype = torch.float32
    return config
