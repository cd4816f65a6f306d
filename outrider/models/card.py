"""One record of what a model is: all that code asks of a model's config once it is loaded.

Made of transformers' config at a model's first start, kept as JSON, and read at every later one,
which imports no config class.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

MOST = 1 << 50  # of anything that is counted in a model


@dataclass(frozen=True)
class ModelCard:
    """A model's config, by the names that we use. Of a checkpoint with pictures or sounds it is
    that of the text part.

    pydantic checks one that is read from a file (`runtime/kept.py`).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "extra": "forbid"}

    model_type: str  # as in config.json
    commit: str | None  # of a model on the hub
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embeddings
    context_length: int  # positions that the config names
    usable_context: int  # those that a cache may hold
    ties_embeddings: bool  # the output layer is the table of embeddings
    has_experts: bool
    quantisation: str | None  # the method of quantised weights
    values: dict[str, Any]  # of config.json, to tell one model from another

    def __post_init__(self) -> None:
        """Raises ValueError for a count that no model has."""
        counts = (
            self.hidden_size,
            self.num_layers,
            self.vocab_size,
            self.context_length,
            self.usable_context,
        )
        if not all(0 <= count <= MOST for count in counts):
            raise ValueError(f"sizes of a model that has none of these: {counts}")


def unknown_card(vocab_size: int = 0) -> ModelCard:
    """The card of what stands in for a model that is elsewhere."""
    return ModelCard(
        model_type="unknown",
        commit=None,
        hidden_size=0,
        num_layers=0,
        vocab_size=vocab_size,
        context_length=0,
        usable_context=0,
        ties_embeddings=False,
        has_experts=False,
        quantisation=None,
        values={},
    )


def plain_values(config: Any) -> dict[str, Any]:
    """The values of a transformers config as JSON has them."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return values
