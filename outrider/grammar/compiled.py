"""A grammar that was checked, and the matchers made of it.

Matchers of llguidance that are copies of one another share a lexer, which grows with every text
that is read and may only become so large ("too many expressions", "too many states"). A text that
uses it up breaks all copies, those to come, too; and a broken matcher raises nothing: it counts as
stopped, allows the end token alone, and stays like that. So whose matcher broke says so here: it
continues with a lexer of its own, and rows to come share a new one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from outrider.errors import RequestError

# allowed tokens that may all begin the same text: as many as the longest token has bytes
MAX_BEGINNINGS = 64

log = logging.getLogger("outrider.grammar")


class Compiled:
    """`make`: a matcher at the grammar's beginning, with a lexer of its own. Raises RequestError
    when not even that can be."""

    def __init__(self, name: str, make: Callable[[], Any], index: Any = None) -> None:
        """`index`: llguidance's LLTokenizer, to spell what the grammar forces."""
        self._name = name
        self._index = index
        self._make = make
        self.is_spent = False  # the lexer that copies share; set and read by any thread
        began = time.thread_time()
        self._shared = make()
        # the first mask builds the lexer's first states: once, not per row
        self._shared.compute_logit_bias()
        if self._shared.is_error():
            raise self.refusal(self._shared)
        self.seconds = time.thread_time() - began  # of a processor, to make one

    def only_way(self, mask: Tensor) -> int | None:
        """The longest allowed token, if all allowed ones are beginnings of its text; None: there are
        other ways to continue."""
        allowed = np.flatnonzero(mask.numpy())
        if self._index is None or not 0 < len(allowed) <= MAX_BEGINNINGS:
            return None
        tokens = [int(token) for token in allowed]
        if any(self._index.is_special_token(token) for token in tokens):
            return None
        longest = max(tokens, key=lambda token: len(self.bytes_of(token)))
        text = self.bytes_of(longest)
        return longest if all(text.startswith(self.bytes_of(token)) for token in tokens) else None

    def bytes_of(self, token: int) -> bytes:
        return bytes(self._index.decode_bytes([token]))

    def spelled(self, text: bytes) -> list[int]:
        """Tokens of a text, as the tokenizer spells it, without the last ones, which its
        continuation may change."""
        return list(self._index.tokenize_partial(text)[0])

    def copy(self) -> Any:
        """For a row that begins."""
        return self._shared.deep_copy()

    def is_lexer_used_up(self, matcher: Any) -> bool:
        """Whether a matcher that is broken would not be with a new lexer. The parser's limits hold
        for one step."""
        return bool(matcher.get_error().startswith("lexer error"))

    def anew(self) -> Any:
        """For a row whose matcher broke; it may break again, which `is_error` says."""
        self.is_spent = True
        log.info(
            "the texts of %s used up the lexer they shared: a row continues with one of its own",
            self._name,
        )
        return self._make()

    def refusal(self, matcher: Any) -> RequestError:
        """The error to raise for a matcher that is broken."""
        why = matcher.get_error().splitlines()[0]
        return self.refusal_of(why)

    def refusal_of(self, why: str) -> RequestError:
        """The error to raise for a matcher that broke, in llguidance's words or ours."""
        if why == "NoExtensionBias":  # llguidance's word for a text in which no token fits
            return RequestError(
                f"{self._name} asks for a text that the tokens of this model cannot spell: use "
                "other characters"
            )
        return RequestError(
            f"{self._name} takes more work than one answer may cost ({why}): let it repeat less, "
            "or ask for a shorter answer"
        )
