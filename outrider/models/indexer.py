"""Sparse attention: an indexer scores every position that a token sees, and attention reads the
best `index_topk` of them.

    score of a position = sum over the indexer's heads of (weight of the head) * relu(its query .
    the position's key * scale)

Weights and queries are of the token that looks. The indexer has one key for all its heads, which
the cache keeps as one more layer, after those of the model. transformers' code makes queries, keys
and weights. Where it continues to score, it is handed an object that stands for the scores and writes
down what they are made of; a function of ours then chooses. Of equal scores the lowest position
stands first: torch's `topk`, which transformers asks, promises no order there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kv import LayerShape
from outrider.models.latent import has_latents

# the attribute of an indexer that asks us: the number of its layer in the cache
NUMBER = "cache_layer"
# of transformers' cache, where an indexer's keys lie next to the others
KEPT_LAYER = "DynamicIndexedLayer"


@dataclass(frozen=True)
class Scores:
    """The inputs of one indexer's scores in one pass."""

    query: Tensor  # (B, T, heads, size) of the key's type
    key: Tensor  # (B, T, size), of the pass's tokens
    weights: Tensor  # (B, T, heads) fp32
    scale: float
    count: int  # positions that are chosen, or all where a token sees fewer


# The number of an indexer's layer in the cache, and its scores -> places of what each token chooses
# (B, T, count)
Choose = Callable[[int, Scores], Tensor]
CHOOSE: dict[str, Choose] = {}  # by the name of the attention function that reads the choice


def keep_choices(module: nn.Module) -> None:
    """Indexers of this model ask our functions for their choice from now on, where attention is one
    of ours."""
    config: Any = module.config
    number: int = getattr(config.get_text_config(), "num_hidden_layers", 0)
    for part in module.modules():
        indexer: Any = getattr(part, "indexer", None)
        if has_latents(part) and hasattr(indexer, "index_topk"):
            if not hasattr(indexer, NUMBER):
                indexer.forward = partial(_forward, indexer, indexer.forward)
            setattr(indexer, NUMBER, number)
            number += 1


def number_indexers(module: nn.Module, number: int) -> None:
    """Give the layers of the indexers that ask us these numbers in the cache, from `number` on."""
    for later, part in enumerate(_asking(module)):
        setattr(part, NUMBER, number + later)


def indexer_layers(module: nn.Module) -> tuple[LayerShape, ...]:
    """The cache's entries for the indexers that ask us, in order."""
    return tuple(LayerShape(1, part.head_dim, 0, is_indexer=True) for part in _asking(module))


def _asking(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if hasattr(part, NUMBER)]


def _forward(indexer: Any, plain: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    choose = CHOOSE.get(indexer.config._attn_implementation)
    if choose is None:
        return plain(*args, **options)
    written = _Written()
    plain(*args, **{**options, "past_key_values": written})
    return choose(getattr(indexer, NUMBER), written.scores(indexer.index_topk))


class _Written:
    """Stands for an indexer's cache and for the scores of its keys: writes down each step that
    transformers' code takes."""

    shape = (1 << 40,)  # positions: a choice is never limited by how many there are

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._steps: list[Any] = []
        self._scale = 1.0

    def update_indexer(self, key: Tensor, layer: int) -> _Written:
        self._key = key
        return self

    def _same(self, *args: object, **options: object) -> _Written:
        return self

    transpose = float = unsqueeze = squeeze = masked_fill = __add__ = topk = to = _same

    @property
    def indices(self) -> _Written:
        return self

    def __mul__(self, factor: Any) -> _Written:
        self._scale *= factor
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = next(each for each in args if isinstance(each, cls))
        written._steps.append(args[0] if function is torch.matmul else function)
        return written

    def scores(self, count: int) -> Scores:
        """The inputs that were recorded. Raises TypeError for scores of another kind."""
        query, last, weights = self._steps if len(self._steps) == 3 else (None, None, None)
        if (
            self._key is None
            or last is not F.relu
            or not isinstance(query, Tensor)
            or not isinstance(weights, Tensor)
        ):
            raise TypeError("an indexer that scores in another way")
        return Scores(query.to(self._key.dtype), self._key, weights.squeeze(-2), self._scale, count)
