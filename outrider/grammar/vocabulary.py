"""The bytes of a model's tokens, as llguidance wants them.

It reads the common fast tokenizers by itself (byte-level BPE, SentencePiece with bytes). For others
the tokens' bytes come from `models/tokens/token_bytes.py`, which reads them from the decoder; a
vocabulary that only implies the spaces between words cannot be held to a grammar, for no token says
where its word ends.

Special tokens, and added ones that are written <...>, spell no text: a grammar must ask for such a
token by its name or number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from outrider.errors import CapabilityError
from outrider.models.tokens.model_tokenizer import whole_tokenizer
from outrider.models.tokens.token_bytes import token_bytes

SPACES = "implies the spaces between its words, so a grammar cannot be applied to it"
NO_BYTES = "does not say which bytes its tokens add to a text, so a grammar cannot be applied to it"


def index_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> Any:
    """llguidance's LLTokenizer over `vocab_size` tokens. Raises CapabilityError."""
    import llguidance
    import llguidance.hf
    import transformers

    if tokenizer is None:
        raise CapabilityError("this model has no tokenizer, so a grammar cannot be applied to it")
    end_token = tokenizer.eos_token_id
    eos = sorted(eos_token_ids) or ([] if end_token is None else [end_token])
    if not eos:
        raise CapabilityError(
            "this model has no end token, so an answer under a grammar could not end"
        )
    whole = whole_tokenizer(tokenizer)
    if isinstance(whole, transformers.PreTrainedTokenizerFast):
        try:
            return llguidance.hf.from_tokenizer(whole, n_vocab=vocab_size, eos_token=eos)
        except ValueError:  # a kind of vocabulary it does not know
            pass
    words = llguidance.TokenizerWrapper(_bytes_of(tokenizer, vocab_size, eos[0]))
    return llguidance.LLTokenizer(words, n_vocab=vocab_size, eos_token=eos, slices=[])


@dataclass(frozen=True)
class _Bytes:
    """The attributes that `TokenizerWrapper` reads."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None


def _bytes_of(tokenizer: Any, vocab_size: int, eos: int) -> _Bytes:
    known = token_bytes(tokenizer)
    if known is None or not known.is_joined or known.shape.implies_spaces:
        reason = SPACES if known is not None and known.shape.implies_spaces else NO_BYTES
        raise CapabilityError(f"the tokenizer {type(tokenizer).__name__} {reason}")
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    marks = {
        token
        for token, entry in added.items()
        if entry.content.startswith("<") and entry.content.endswith(">")
    }
    special = marks | known.special_ids | set(tokenizer.all_special_ids)
    return _Bytes([known.bytes_of(token) for token in range(vocab_size)], sorted(special), eos)
