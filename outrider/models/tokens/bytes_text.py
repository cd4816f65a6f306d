"""Text from the bytes of tokens: whole characters as soon as their last byte is there, U+FFFD for
bytes that are none.

Decoders with byte fallback print a whole run of byte tokens as U+FFFD when one byte of it is
broken, which would take back characters that a stream has shown. Here, as in SentencePiece itself,
every broken byte is one U+FFFD and the others stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.tokens.token_bytes import TokenBytes

MAX_UNFINISHED = 3  # bytes, so also tokens, of a character whose last byte is missing
UNFINISHED = "\ufffd"  # what a decoder prints for bytes that are no character


class BytesText:
    """The text of tokens that have bytes of their own, token by token, after a prompt."""

    def __init__(
        self, tokens: TokenBytes, prompt: Sequence[int], hidden: frozenset[int] = frozenset()
    ) -> None:
        """`hidden`: tokens that the text does not show."""
        self._tokens = tokens
        self._hidden = hidden
        self._is_first = tokens.shape.treats_first_apart
        self._strips = tokens.shape.max_strips  # how often `shape.strip` may still be removed
        self._pending = b""  # of a character without its last byte
        for token in prompt:
            if not (self._is_first or self._strips):
                break
            self._enter(token)
        self._pending = split_text(self._last_bytes(prompt), each_byte=False)[1]

    @property
    def is_unfinished(self) -> bool:
        """Whether a character has begun whose last byte is missing."""
        return bool(self._pending)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token would add here."""
        if token in self._hidden:
            return b""
        return (
            self._stripped(token)[0]
            if self._is_first or self._strips
            else self._tokens.bytes_of(token)
        )

    def push(self, token: int) -> str:
        """The text this token completes."""
        if token in self._hidden:
            return ""
        data = (
            self._enter(token) if self._is_first or self._strips else self._tokens.bytes_of(token)
        )
        text, self._pending = split_text(
            self._pending + data, each_byte=self._tokens.shape.has_byte_fallback
        )
        return text

    def flush(self) -> str:
        """U+FFFD for an unfinished character at the end."""
        left = self._pending
        self._pending = b""
        return UNFINISHED * (len(left) if self._tokens.shape.has_byte_fallback else bool(left))

    def _enter(self, token: int) -> bytes:
        """The bytes of a token at the beginning of the text, which may end with it."""
        if token in self._hidden:
            return b""
        data, self._strips = self._stripped(token)
        self._is_first = self._is_first and not self._tokens.has(token)
        return data

    def _stripped(self, token: int) -> tuple[bytes, int]:
        """(bytes of a token at the beginning of the text, how often the decoder may still strip
        after it)"""
        data = (
            self._tokens.bytes_at_start(token) if self._is_first else self._tokens.bytes_of(token)
        )
        strip = self._tokens.shape.strip
        left = self._strips
        while left and data.startswith(strip):
            data = data.removeprefix(strip)
            left = left - 1
        return data, 0 if data else left

    def _last_bytes(self, prompt: Sequence[int]) -> bytes:
        """The last bytes of the prompt: as many as an unfinished character may have, or a few more."""
        data = b""
        for token in reversed(prompt):
            if len(data) >= MAX_UNFINISHED:
                break
            data = (b"" if token in self._hidden else self._tokens.bytes_of(token)) + data
        return data


def split_text(data: bytes, *, each_byte: bool) -> tuple[str, bytes]:
    """(text of the bytes, bytes at the end that may still become a character). `each_byte`: U+FFFD
    for each broken byte, as decoders with byte fallback print it; else one for all that could have
    begun a character (Unicode's maximal subpart)."""
    text = ""
    while True:
        try:
            return text + data.decode(), b""
        except UnicodeDecodeError as error:
            text += data[: error.start].decode()
            if error.reason == "unexpected end of data":
                return text, data[error.start :]
            text += UNFINISHED * (error.end - error.start if each_byte else 1)
            data = data[error.end :]
