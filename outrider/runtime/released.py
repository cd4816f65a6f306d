"""Linear layers without weights: of heads whose passes the executor makes, from panels of its own."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


class ReleasedLinear(nn.Module):
    """A linear layer in name alone."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.out_features, layer.in_features

    def forward(self, x: Tensor) -> Tensor:
        """Never called, because code that runs the module itself must not release its layers."""
        raise AssertionError("this layer's weights are in the native runtime's panels alone")


def release_linears(module: nn.Module, kept: Collection[nn.Module | None] = ()) -> None:
    """Drop the weights of the module's linear layers, but for those inside the parts that are `kept`."""
    stay = {id(layer) for part in kept if part is not None for layer in part.modules()}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and id(child) not in stay:
                setattr(parent, name, ReleasedLinear(child))
