"""Attention of model code that is older than transformers' interface for it, handed to that interface.

Where the config names an attention that is registered by us, the layer's `forward` asks the interface for it, as newer code does;
otherwise it is what it was. Which layers: `families/`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from outrider.lazy import transformers
from outrider.models.families import ATTENTION
from outrider.models.indexer import keep_choices
from outrider.models.latent import keep_latents

PLAIN = ("eager", "sdpa", "flash_attention_2")  # attention for which the layer's own code stays


def hand_over(module: nn.Module) -> None:
    """Make a model of such a family ask transformers' interface for its attention; others hand it latents.

    Indexers ask us for their choices.
    """
    keep_latents(module)
    keep_choices(module)
    parts: list[Any] = [part for part in module.modules() if type(part).__name__ in ATTENTION]
    for part in parts:
        ours = ATTENTION[type(part).__name__](part, module.config)
        if "forward" not in vars(part) and ours is not None:
            part.forward = partial(_either, module.config, part.forward, ours)
    models: list[Any] = [part for part in module.modules() if parts and isinstance(part, transformers.PreTrainedModel)]
    for model in models:
        model._can_set_attn_implementation = _yes  # transformers looks for a call of the interface in the source


def _yes() -> bool:
    return True


def _either(config: Any, plain: Callable[..., Any], ours: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the method was, or what it is made to be where the config names another attention."""
    if config._attn_implementation in PLAIN:
        return plain(*args, **options)
    return ours(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[config._attn_implementation], *args, **options)
