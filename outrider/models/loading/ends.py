"""Which tokens end a text, by all that a checkpoint says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def eos_token_ids(module: nn.Module, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> frozenset[int]:
    """Every token id that ends a text: generation_config's (config's where that names none) and the tokenizer's eos_token.

    This is vLLM's rule. Fine-tunes often name the end of a turn in one place and the end of a document in the other. Ids outside
    the vocabulary, as some configs have them (-1), are left out. Raises CheckpointError for what is no id.
    """
    named, fallback, own = (_eos_ids(source, vocab_size) for source in (module.generation_config, module.config, tokenizer))
    return (named or fallback) | own


def _eos_ids(source: Any, vocab_size: int) -> frozenset[int]:
    value = getattr(source, "eos_token_id", None)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(token, int) for token in ids):
        remedy = "mend it in generation_config.json or config.json"
        raise CheckpointError(f"'eos_token_id' must be a token id or a list of some, got {str(value)[:80]}: {remedy}.")
    return frozenset(token for token in ids if 0 <= token < vocab_size)
