"""Attention of model code that is older than transformers' interface for it, handed to that
interface.

Where the config names an attention that is registered by us, the layer's `forward` asks the
interface for it, as newer code does; otherwise it is what it was. Which layers: `families/`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from outrider.lazy import transformers
from outrider.models.families import ATTENTION
from outrider.models.indexer import keep_choices
from outrider.models.latent import keep_latents

PLAIN = ("eager", "sdpa", "flash_attention_2")  # attention for which the layer's own code stays


def hand_over(module: nn.Module) -> None:
    """Make a model of such a family ask transformers' interface for its attention; others hand it
    latents.

    Indexers ask us for their choices.
    """
    keep_latents(module)
    keep_choices(module)
    parts: list[Any] = [part for part in module.modules() if type(part).__name__ in ATTENTION]
    for part in parts:
        ours = ATTENTION[type(part).__name__](part, module.config)
        if "forward" not in vars(part) and ours is not None:
            part.forward = partial(_either, module.config, part.forward, ours)
    models: list[Any] = [
        part
        for part in module.modules()
        if parts and isinstance(part, transformers.PreTrainedModel)
    ]
    for model in models:
        # transformers looks for a call of the interface in the source
        model._can_set_attn_implementation = _yes


def _yes() -> bool:
    return True


def _either(
    config: Any, plain: Callable[..., Any], ours: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """The original method, or its replacement where the config names another attention."""
    if config._attn_implementation in PLAIN:
        return plain(*args, **options)
    return ours(
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[config._attn_implementation],
        *args,
        **options,
    )


LOGGER = "transformers.integrations.hub_kernels"
SLOW = "is falling back to its reference PyTorch implementation"


class SlowPaths(logging.Filter):
    """The warnings that were held back; `tell` passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        is_slow = SLOW in record.getMessage()
        if is_slow:
            self._records.append(record)
        return not is_slow

    def tell(self) -> None:
        """Log them now: transformers does so only once."""
        for record in self._records:
            logging.getLogger(record.name).handle(record)


@contextlib.contextmanager
def slow_paths_held() -> Iterator[SlowPaths]:
    """Hold such warnings back meanwhile."""
    held = SlowPaths()
    logger = logging.getLogger(LOGGER)
    logger.addFilter(held)
    try:
        yield held
    finally:
        logger.removeFilter(held)
