"""Token ids to text as they arrive, and where brackets in a text close.

A token is not always text: the bytes of one character may be spread over several tokens, and a
leading space may depend on the token before. Text is released as soon as it can no longer change: a
character with its last byte, U+FFFD with the byte that shows that the bytes before it are no
character.

The text of an answer begins where the last whole character of its prompt ends. A prompt that was
cut inside a character leaves its first bytes to the answer, so prompt and answer joined are the
text of all tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice, takewhile
from typing import Any, Protocol

from outrider.models.tokens.bytes_text import MAX_UNFINISHED, UNFINISHED, BytesText
from outrider.models.tokens.token_bytes import TokenBytes, decoded, special_ids, token_bytes

CONTEXT = 6  # tokens decoded along where a token's text depends on those before it


class Detokenizer:
    """Text of one row, token by token, in constant time per token."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        special: bool = False,
        silent: Collection[int] = frozenset(),
    ) -> None:
        """`special`: the text shows special tokens; it never shows those in `silent`."""
        known = token_bytes(tokenizer)
        self._hidden = frozenset(silent) if special else special_ids(tokenizer).union(silent)
        self._text: _Text
        if known is not None and known.is_joined:
            self._text = BytesText(known, prompt, self._hidden)
        else:
            self._text = _WindowText(tokenizer, known, prompt, self._hidden, special=special)
        self.num_characters = 0  # of whole characters released so far

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token would add to the text here; empty for a token that the text does
        not show."""
        return self._text.bytes_of(token)

    def hides(self, token: int) -> bool:
        """Whether the text never shows this token."""
        return token in self._hidden

    def push(self, token: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        return self._counted(self._text.push(token))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an unfinished character."""
        return self._counted(self._text.flush())

    def _counted(self, text: str) -> str:
        self.num_characters += len(text)
        return text


def decode(tokenizer: Any, ids: Sequence[int], *, special: bool = False, flush: bool = True) -> str:
    """Text of whole answers or prompts as a `Detokenizer` releases it. Without `flush` an
    unfinished character is left out."""
    text = decoded(tokenizer, ids, special=special)
    if UNFINISHED not in text:
        return text
    detokenizer = Detokenizer(tokenizer, [], special=special)
    text = "".join([detokenizer.push(token) for token in ids])
    return text + detokenizer.flush() if flush else text


class _Text(Protocol):
    def bytes_of(self, token: int) -> bytes: ...

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class _WindowText:
    """Text of a tokenizer whose tokens have no bytes of their own: its last tokens are decoded
    again with every new one."""

    def __init__(
        self,
        tokenizer: Any,
        tokens: TokenBytes | None,
        prompt: Sequence[int],
        hidden: frozenset[int],
        *,
        special: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._hidden = hidden
        self._special = special
        self._ids: list[int] = []
        self._done = 0  # ids before this have been released
        for token in reversed(
            list(islice((token for token in reversed(prompt) if token not in hidden), 2 * CONTEXT))
        ):
            self.push(token)

    def bytes_of(self, token: int) -> bytes:
        if token in self._hidden:
            return b""
        before = self._decode(len(self._ids))
        text = self._decode(len(self._ids) + 1, token)
        if self._tokens is not None and not text.startswith(before):
            return self._tokens.bytes_of(token)
        return text.removeprefix(before).encode()

    def push(self, token: int) -> str:
        if token in self._hidden or not (self._tokens is None or self._tokens.has(token)):
            return ""
        self._ids.append(token)
        is_whole = not self._decode(len(self._ids)).endswith(UNFINISHED)
        return self._release(
            len(self._ids) if is_whole else max(self._done, len(self._ids) - MAX_UNFINISHED)
        )

    def flush(self) -> str:
        return self._release(len(self._ids))

    def _release(self, end: int) -> str:
        """The text of the tokens up to `end`, as far as it was not released."""
        before = self._decode(self._done)
        text = self._decode(end)
        drop = max(0, end - CONTEXT)
        del self._ids[:drop]
        self._done = end - drop
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
        )
        return text[same:]

    def _decode(self, end: int, *more: int) -> str:
        ids = [*self._ids, *more][:end]
        return decoded(self._tokenizer, ids, special=self._special) if ids else ""


class Brackets:
    """Finds the end of what is in brackets, or of a text in quotes, letter by letter; brackets in
    quotes do not count."""

    def __init__(self, opening: str = "{[", closing: str = "}]", quotes: str = '"') -> None:
        self._opening = opening
        self._closing = closing
        self._quotes = quotes
        self.depth = 0  # below 0: more were closed than opened
        self._quote = ""
        self._escaped = False

    def closes(self, letter: str) -> bool:
        """Take in a letter; whether it closes what was opened first."""
        if self._quote:
            ends = letter == self._quote and not self._escaped
            self._quote = "" if ends else self._quote
            self._escaped = letter == "\\" and not self._escaped
            return ends and self.depth == 0
        if letter in self._quotes:
            self._quote = letter
            self._escaped = False
        self.depth += (letter in self._opening) - (letter in self._closing)
        return letter in self._closing and self.depth <= 0
