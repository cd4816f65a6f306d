"""The target's hidden states and logits for a batch of texts, computed on demand.

Nothing is kept unless `cache` (feature_cache.py) is given. Logits are not kept where the output
layer computes them again from the states after the final norm: T x H numbers a text instead of T x
V. Source of the numbering of layers: models/signals.py.

Texts are padded on their right, so nothing before a text's end can see the padding, and the pass
needs no mask: torch's causal attention is faster without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError, NumericalError
from outrider.models.signals import AFTER_NORM, Listening
from outrider.train.feature_cache import FeatureCache, Features
from outrider.train.recipe import FeatureBatch
from outrider.train.texts import TextBatch


class FeatureSource:
    """The frozen target, listening to the layers that a recipe wants. Raises CapabilityError where
    it has no such layer."""

    def __init__(
        self, module: Any, signals: tuple[int, ...], cache: FeatureCache | None = None
    ) -> None:
        self._module = module
        self._signals = signals
        self.cache = cache
        self._output = None if cache is None else _output_alone(module)
        more = () if self._output is None or AFTER_NORM in signals else (AFTER_NORM,)
        self._listening = Listening(module, (*signals, *more))

    @torch.no_grad()
    def features(
        self, batch: TextBatch, *, split: str = "train", progress: float = 1.0
    ) -> FeatureBatch:
        """The features of a batch of texts. Raises NumericalError when the target's own numbers are
        broken.

        A batch comes from the cache only as a whole, so which bits a text has does not depend on
        what else is cached.
        """
        names = [f"{split}-{number}" for number in batch.numbers]
        cached = None if self.cache is None else self.cache.get_all(names)
        if cached is not None:
            hidden, logits = self._padded(cached, batch)
        else:
            hidden, logits = self._computed(batch)
            if self.cache is not None:
                self._keep(names, batch, hidden, logits)
        return FeatureBatch(batch.tokens, batch.mask, hidden, logits, batch.lengths, progress)

    def _computed(self, batch: TextBatch) -> tuple[dict[int, Tensor], Tensor]:
        states: dict[int, Tensor] = {}
        with self._listening.during(states):
            logits = self._module(input_ids=batch.tokens, use_cache=False).logits
        dtype = torch.float32 if logits.dtype == torch.float16 else None  # which a sum could leave
        sums = logits.sum(dim=-1, dtype=dtype)  # NaN or infinite where a logit is
        if not torch.isfinite(sums[batch.mask]).all():
            raise NumericalError(
                "the target gives NaN or infinite logits on the training texts; try --dtype float32"
            )
        return states, logits

    def _keep(
        self, names: list[str], batch: TextBatch, hidden: dict[int, Tensor], logits: Tensor
    ) -> None:
        assert self.cache is not None
        for row, (name, length) in enumerate(zip(names, batch.lengths.tolist(), strict=True)):
            states = {layer: states[row, :length] for layer, states in hidden.items()}
            self.cache.add(
                name, Features(states, None if self._output is not None else logits[row, :length])
            )

    def _padded(self, cached: list[Features], batch: TextBatch) -> tuple[dict[int, Tensor], Tensor]:
        """(hidden states, logits) of these texts, zeros after their ends."""
        width = batch.tokens.shape[1]
        device = batch.tokens.device

        def stacked(parts: list[Tensor]) -> Tensor:
            out = parts[0].new_zeros(len(parts), width, parts[0].shape[-1])
            for row, part in enumerate(parts):
                out[row, : part.shape[0]] = part
            return out.to(device)

        hidden = {
            layer: stacked([features.hidden[layer] for features in cached])
            for layer in cached[0].hidden
        }
        logits = [features.logits for features in cached if features.logits is not None]
        return hidden, stacked(logits) if self._output is None else self._output(hidden[AFTER_NORM])


@torch.no_grad()
def _output_alone(module: Any) -> nn.Module | None:
    """The output layer, where it alone makes the logits of the states after the final norm: no
    scale, no cap."""
    output = module.get_output_embeddings()
    states = dict[int, Tensor]()
    try:
        with Listening(module, (AFTER_NORM,)).during(states):
            logits = module(
                input_ids=torch.arange(4, device=output.weight.device)[None], use_cache=False
            ).logits
    except CapabilityError:
        return None
    return output if torch.equal(output(states[AFTER_NORM]), logits) else None
