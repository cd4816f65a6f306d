"""One record of what a model is: all that code asks of a model's config once it is loaded.

Made of transformers' config at a model's first start, kept as JSON, and read at every later one, which imports no config class.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, le=1 << 50)]


class ModelCard(BaseModel):
    """A model's config, by the names that we use. Of a checkpoint with pictures or sounds it is that of the text part."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model_type: str  # as in config.json
    commit: str | None  # of a model on the hub
    hidden_size: Count
    num_layers: Count
    vocab_size: Count  # rows of the embeddings
    context_length: Count  # positions that the config names
    usable_context: Count  # those that a cache may hold
    ties_embeddings: bool  # the output layer is the table of embeddings
    has_experts: bool
    quantisation: str | None  # the method of quantised weights
    values: dict[str, Any]  # of config.json, to tell one model from another


def unknown_card(vocab_size: int = 0) -> ModelCard:
    """The card of what stands in for a model that is elsewhere."""
    return ModelCard(
        model_type="unknown", commit=None, hidden_size=0, num_layers=0, vocab_size=vocab_size, context_length=0, usable_context=0,
        ties_embeddings=False, has_experts=False, quantisation=None, values={},
    )  # fmt: skip


def plain_values(config: Any) -> dict[str, Any]:
    """The values of a transformers config as JSON has them."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return values
