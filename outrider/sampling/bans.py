"""Tokens that a request bans: end tokens before its answer is long enough, and words that it must
not contain.

A `Constraint` like a grammar, so it reaches every distribution along every draft path, the target's
and the drafters'; it may stand around a grammar. Names are vLLM's: `min_tokens` holds back end of
text and `stop_token_ids`; `bad_words` looks at the answer, not at the prompt, and keeps a word from
being completed, in whatever tokens it is written (`words.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.sampling.constraint import Constraint
from outrider.sampling.words import BadWords, Tail


class Bans:
    """The bans of one row. `ends`: tokens that end its answer; `only`: the tokens it may have, None
    for all; `inner`: its grammar."""

    def __init__(
        self,
        vocab_size: int,
        *,
        min_tokens: int = 0,
        ends: Collection[int] = (),
        words: BadWords | None = None,
        only: Collection[int] | None = None,
        inner: Constraint | None = None,
    ) -> None:
        self._min_tokens = min_tokens
        self._words = words
        self._inner = inner
        self._ends = frozenset(token for token in ends if token < vocab_size)
        self._free = torch.full((vocab_size,), only is None)
        self._free[list(only or ())] = True
        self._never = frozenset[int]() if words is None else words.anywhere
        self._free[list(self._never)] = False
        self._num_emitted = 0
        self._tail = Tail()
        # draft paths after which nothing was allowed
        self._dead_ends: set[tuple[int, ...]] = set()
        self._since: list[int] = []  # committed since they were asked about

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """The answer ends even if it is short where nothing else could follow, like after a
        complete grammar.

        Raises RequestError where words, grammar and the allowed tokens leave no token for the
        committed text to continue with. A draft path that leads there may still be accepted: then
        `commit` raises for the token after it.
        """
        if self._since:
            self._dead_ends = set()
            self._since = []
        masks = (
            self._free.expand(len(paths), -1).clone()
            if self._inner is None
            else self._free & self._inner.allowed(paths)
        )
        for mask, path in zip(masks, paths, strict=True):
            mask[list(self._completing(path))] = False
            banned_ends = list(self._banned_ends(path))
            ends = mask[banned_ends]
            mask[banned_ends] = False
            if not _any(mask):
                mask[banned_ends] = ends
            if not _any(mask):
                mask[:] = self._at_dead_end(path)
        return masks

    def _at_dead_end(self, path: Sequence[int]) -> Tensor:
        if not path:
            raise self._failure()
        self._dead_ends.add(tuple(path))
        mask = self._free.clone()
        mask[[*self._completing(path), *self._ends]] = False
        return mask if _any(mask) else torch.ones_like(mask)

    def forbids(self, path: Sequence[int], token: int) -> bool:
        """Whether the bans alone, without a grammar, keep the token from following committed +
        path."""
        return (
            token in self._never
            or token in self._banned_ends(path)
            or token in self._completing(path)
        )

    def bite(self, path: Sequence[int]) -> bool:
        """Whether the bans alone keep any token from following committed + path."""
        return bool(self._never or self._banned_ends(path) or self._completing(path))

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        return [] if self._inner is None else self._inner.forced(path, most)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if tuple(self._since) in self._dead_ends:
                raise self._failure()
            self._since.append(token)
            self._num_emitted += 1
            if self._words is not None:
                self._tail = self._words.after(self._tail, [token])
            if self._inner is not None:
                self._inner.commit([token])

    @property
    def is_over(self) -> bool:
        return self._inner is not None and self._inner.is_over

    @property
    def has_grammar(self) -> bool:
        """Whether they stand around a grammar."""
        return self._inner is not None

    def _completing(self, path: Sequence[int]) -> set[int]:
        """Tokens that would complete a word."""
        return (
            set()
            if self._words is None
            else self._words.completing(self._words.after(self._tail, path))
        )

    def _banned_ends(self, path: Sequence[int]) -> Collection[int]:
        return self._ends if self._num_emitted + len(path) < self._min_tokens else ()

    def _failure(self) -> RequestError:
        why = "; its grammar asks for text that they forbid" if self.has_grammar else ""
        return RequestError(f"bad_words leave no token that the answer could continue with{why}")


def _any(mask: Tensor) -> bool:
    return bool(mask.numpy().any())  # a sixtieth of what torch takes
