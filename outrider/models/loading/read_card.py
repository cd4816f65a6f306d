"""From transformers' config to the record of a model (`models/card.py`)."""

from __future__ import annotations

from typing import Any

from outrider.models.card import ModelCard, plain_values
from outrider.models.loading.context import configured_context, context_length
from outrider.models.quantised.checkpoint import quantisation_of
from outrider.models.quantised.scheme import has_experts


def card_of(config: Any) -> ModelCard:
    """The record of a model with this config."""
    text = config.get_text_config()
    return ModelCard(
        model_type=config.model_type,
        commit=getattr(config, "_commit_hash", None),
        hidden_size=_number(text, "hidden_size"),
        num_layers=_number(text, "num_hidden_layers"),
        vocab_size=_number(text, "vocab_size"),
        context_length=int(configured_context(config)),
        usable_context=int(context_length(text)),
        ties_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        has_experts=has_experts(config),
        quantisation=quantisation_of(config),
        values=plain_values(config),
    )


def _number(text: Any, name: str) -> int:
    """A value of the config; 0 for a model of another kind, which loading refuses."""
    value = getattr(text, name, None)
    return value if isinstance(value, int) else 0
