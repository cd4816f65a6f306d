"""What the target says about a batch of texts: hidden states and logits, computed when they are asked for.

Nothing is kept unless `cache` (feature_cache.py) is given: features of a text of T tokens are T x (H x layers + V) numbers, which
for a large vocabulary is terabytes a corpus. Source of the numbering of layers: models/signals.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.errors import NumericalError
from outrider.models.signals import Listening
from outrider.train.feature_cache import FeatureCache, Features
from outrider.train.recipe import FeatureBatch
from outrider.train.texts import TextBatch


class FeatureSource:
    """The frozen target, listening to the layers that a recipe wants. Raises CapabilityError where it has no such layer."""

    def __init__(self, module: Any, signals: tuple[int, ...], cache: FeatureCache | None = None) -> None:
        self._module, self._signals, self.cache = module, signals, cache
        self._listening = Listening(module, signals)

    @torch.no_grad()
    def features(self, batch: TextBatch, *, split: str = "train", progress: float = 1.0) -> FeatureBatch:
        """The features of a batch of texts. Raises NumericalError when the target's own numbers are broken.

        A batch comes from the cache only as a whole, so which bits a text has does not depend on what else is cached.
        """
        names = [f"{split}-{number}" for number in batch.numbers]
        cached = None if self.cache is None else self.cache.get_all(names)
        if cached is not None:
            hidden, logits = _padded(cached, self._signals, batch)
        else:
            hidden, logits = self._computed(batch)
            if self.cache is not None:
                self._keep(names, batch, hidden, logits)
        return FeatureBatch(batch.tokens, batch.mask, hidden, logits, batch.lengths, progress)

    def _computed(self, batch: TextBatch) -> tuple[dict[int, Tensor], Tensor]:
        heard: dict[int, Tensor] = {}
        attention = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None] < batch.lengths[:, None]
        with self._listening.during(heard):
            logits = self._module(input_ids=batch.tokens, attention_mask=attention.long(), use_cache=False).logits
        if not torch.isfinite(logits[batch.mask]).all():
            raise NumericalError("the target gives NaN or infinite logits on the training texts; try --dtype float32")
        return heard, logits

    def _keep(self, names: list[str], batch: TextBatch, hidden: dict[int, Tensor], logits: Tensor) -> None:
        assert self.cache is not None
        for row, (name, length) in enumerate(zip(names, batch.lengths.tolist(), strict=True)):
            states = {layer: states[row, :length] for layer, states in hidden.items()}
            self.cache.add(name, Features(states, logits[row, :length]))


def _padded(cached: list[Features], signals: tuple[int, ...], batch: TextBatch) -> tuple[dict[int, Tensor], Tensor]:
    width, device = batch.tokens.shape[1], batch.tokens.device

    def stacked(parts: list[Tensor]) -> Tensor:
        out = parts[0].new_zeros(len(parts), width, parts[0].shape[-1])
        for row, part in enumerate(parts):
            out[row, : part.shape[0]] = part
        return out.to(device)

    hidden = {layer: stacked([one.hidden[layer] for one in cached]) for layer in signals}
    return hidden, stacked([one.logits for one in cached])
