"""Which tokens of a model write words that an answer may not hold."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from outrider.errors import ConfigError
from outrider.models.tokens.token_bytes import special_ids
from outrider.models.tokens.token_text import vocabulary_bytes
from outrider.sampling.words import BadWords, Spelling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_KEPT = 16  # lists of words whose tokens are remembered


class BadWordFinder:
    """Finds the tokens that write bad words. That takes milliseconds a word, so the last few
    answers are kept."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, label: str
    ) -> None:
        """`vocab_size`: width of the logits. `label`: what messages call the model."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._label = label
        self._kept: dict[tuple[tuple[str, ...], bool], BadWords] = {}

    def find(self, words: tuple[str, ...], *, shows_specials: bool) -> BadWords:
        """The tokens that write these words. `shows_specials`: special tokens are text, too.

        Raises ConfigError for a model without a tokenizer."""
        key = (words, shows_specials)
        tokens = self._kept.get(key)
        if tokens is None:
            silent = () if shows_specials else special_ids(self._tokenizer)
            tokens = BadWords(self._spelling, words, silent=silent)
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = tokens
        return tokens

    @cached_property
    def _spelling(self) -> Spelling:
        """The text of each token."""
        if self._tokenizer is None:
            raise ConfigError(
                f"'{self._label}' has no tokenizer, so nobody knows what its tokens write"
            )
        return Spelling(vocabulary_bytes(self._tokenizer, self._vocab_size))
