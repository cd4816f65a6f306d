"""What a request wants left unsaid: end tokens before its answer is long enough, and words that it may not hold.

A `Constraint` like a grammar, so it reaches every law along every draft path, the target's and the drafters'; it may stand around
a grammar. Names and meaning are vLLM's: `min_tokens` holds back end of text and `stop_token_ids`, `bad_words` looks at the
answer, not at the prompt, and keeps the last token of a word from following those before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.sampling.constraint import Constraint


class Bans:
    """Of one row. `ends`: tokens that end its answer; `words`: token ids of each bad word; `inner`: the row's grammar."""

    def __init__(
        self, vocab_size: int, *, min_tokens: int = 0, ends: Collection[int] = (), words: Sequence[Sequence[int]] = (),
        inner: Constraint | None = None,
    ) -> None:  # fmt: skip
        self._vocab_size, self._min_tokens, self._inner = vocab_size, min_tokens, inner
        self._ends = [token for token in ends if token < vocab_size]
        self._words = [tuple(word) for word in words]
        self._longest = max((len(word) for word in self._words), default=1)
        self._num_said = 0
        self._last: list[int] = []  # of what was said, as many as a word may need

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """A grammar that has come to its end ends the answer even if it is short: nothing else could follow."""
        free = torch.ones(len(paths), self._vocab_size, dtype=torch.bool)
        masks = free if self._inner is None else self._inner.allowed(paths).clone()
        for mask, path in zip(masks, paths, strict=True):
            mask[self._banned_words(path)] = False
            banned_ends = self._banned_ends(path)
            ends = mask[banned_ends]
            mask[banned_ends] = False
            if not mask.any():
                mask[banned_ends] = ends
        return masks

    def forbidden(self, path: Sequence[int]) -> set[int]:
        """Tokens that may not follow committed + path because of the bans alone, whatever a grammar says."""
        return {*self._banned_words(path), *self._banned_ends(path)}

    def commit(self, tokens: Sequence[int]) -> None:
        self._num_said += len(tokens)
        self._last = [*self._last, *tokens][-self._longest :]
        if self._inner is not None:
            self._inner.commit(tokens)

    @property
    def is_over(self) -> bool:
        return self._inner is not None and self._inner.is_over

    @property
    def has_grammar(self) -> bool:
        """Whether they stand around a grammar."""
        return self._inner is not None

    def _banned_words(self, path: Sequence[int]) -> list[int]:
        said = [*self._last, *path]
        return [last for *begin, last in self._words if not begin or said[-len(begin) :] == begin]

    def _banned_ends(self, path: Sequence[int]) -> list[int]:
        return self._ends if self._num_said + len(path) < self._min_tokens else []


def word_ids(tokenizer: Any, words: Sequence[str], vocab_size: int) -> list[list[int]]:
    """Each word's token ids, as it stands alone and as it stands behind a space where that is as many tokens (vLLM's rule).
    Raises ConfigError for one that this vocabulary cannot write."""
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip() or word
        alone, spaced = ([] if tokenizer is None else _ids(tokenizer, prefix + bare) for prefix in ("", " "))
        if not alone or max(alone) >= vocab_size:
            raise ConfigError(f"bad_words holds {word!r}, of which this model's tokenizer makes no tokens")
        found.append(alone)
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            found.append(spaced)
    return found


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
