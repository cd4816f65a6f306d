"""What one token is in bytes: a token may be half a character, which no text can show.

Vocabularies write tokens in three ways: byte-level BPE maps every byte to a printable letter (GPT-2 and its heirs),
SentencePiece writes a space as U+2581 and single bytes as <0xNN>, others write plain text.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from outrider.errors import CapabilityError

SPACE = "\u2581"


class TokenBytes:
    """Bytes and text of single tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises CapabilityError for a tokenizer that does not say how its vocabulary is written."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CapabilityError(
                f"the server reads vocabularies of the tokenizers library, but this model's {type(tokenizer).__name__} is Python "
                "code of its own: put a tokenizer.json beside the weights (transformers' convert_slow_tokenizer makes many)"
            )
        self._tokenizer = tokenizer
        self._added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
        self._letters = _byte_letters() if '"ByteLevel"' in decoder else None
        self._spaces = SPACE in decoder or '"Metaspace"' in decoder
        self._falls_back = '"ByteFallback"' in decoder

    def of(self, token: int) -> bytes:
        """Empty for an id that the vocabulary does not name (padding of the output head)."""
        if token in self._added:
            return self._added[token].encode()
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None:
            return b""
        if self._letters is not None:
            return bytes(self._letters[letter] for letter in written if letter in self._letters)
        if self._falls_back and len(written) == 6 and written.startswith("<0x"):
            return bytes([int(written[3:5], 16)])
        return (written.replace(SPACE, " ") if self._spaces else written).encode()

    def text(self, token: int) -> str:
        """For people and for keys of JSON: bytes that are no whole character appear as OpenAI writes them, 'bytes:\\xe2'."""
        data = self.of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """Letter -> byte of GPT-2's table: printable Latin-1 stands for itself, the rest for the letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
