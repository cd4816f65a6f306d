"""A model without some of its decoder layers, on the same weights: early exit and layer skipping.

The hidden states of every layer live in one space (each layer adds to its input), so the final norm
and the output head can read them early: a draft from the target's first layers, or from all but a
few (LayerSkip, Elhoushi et al. 2404.16710; Draft & Verify, Zhang et al. 2309.08168).

A left-out layer is replaced by one that passes its input on, at its own place in the list. So the
layers that stay keep their numbers, by which attention finds its keys and values, and rotary tables
and masks chosen by layer stay right.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.derived.derive import num_weights, with_replaced
from outrider.models.lm import LM, module_run
from outrider.models.signals import decoder_layers

UNKNOWN = "Early exit does not know this architecture; use another drafter."


class SkippedLayer(nn.Module):
    """Stands where a decoder layer was and hands its input on. Other attributes (its kind of
    attention) are the layer's."""

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a child: its weights are not part of the model
        self.in_tuple = in_tuple

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.in_tuple else hidden_states


class DecoderLayers:
    """The decoder layers of a module, and copies of the module without some of them."""

    def __init__(self, module: Any, target: LM, name: str) -> None:
        """`target` tells how passes run; its cache is not touched. Raises CapabilityError when the
        layers are not found."""
        self.module = module
        self._target = target
        self.layers = decoder_layers(module, name, UNKNOWN)
        self._in_tuple = self._layers_return_tuples()
        self._num_weights = num_weights(module)

    def __len__(self) -> int:
        return len(self.layers)

    def without(self, skipped: Collection[int]) -> nn.Module:
        """The module with these layers left out, everything else shared."""
        stands_for = {id(self.layers[index]): self.layers[index] for index in skipped}

        def replace(part: nn.Module) -> nn.Module | None:
            return SkippedLayer(part, in_tuple=self._in_tuple) if id(part) in stands_for else None

        return with_replaced(self.module, replace)

    def cost(self, skipped: Collection[int]) -> float:
        """Weights a pass without these layers reads, as a share of the whole module's."""
        return 1 - sum(num_weights(self.layers[index]) for index in skipped) / self._num_weights

    def run(self, module: nn.Module) -> LM:
        """An `LM` around a copy, with an empty cache of its own."""
        return LM(module_run(module), self._target.shape, self._target.dtype, self._target.device)

    @torch.inference_mode()
    def _layers_return_tuples(self) -> bool:
        """Older model code returns (hidden states, ...), newer code the hidden states. Seen in one
        pass."""
        returned: list[object] = []
        hook = self.layers[0].register_forward_hook(
            lambda layer, inputs, output: returned.append(output)
        )
        lm = self.run(self.module)
        lm.kv.add_row()
        lm.forward(torch.zeros(1, 2, dtype=torch.int64, device=lm.device))
        hook.remove()
        return isinstance(returned[0], tuple)
