"""The bytes that each token of a tokenizer adds to a text, read from the tokenizer's own decoder.

A vocabulary writes its tokens in a code that only the decoder of its tokenizer.json knows:

    decoder                                     token      bytes inside a text    token at the beginning of a text
    ByteLevel (GPT-2, Qwen, Llama 3)            Ġthere     " there"               the same
    Replace, ByteFallback, Fuse (Gemma)         ▁there     " there"               the same
    ... and Strip (Llama 2, Mistral, Phi-3)     <0xF0>     the byte F0            loses the stripped space
    Metaspace (T5)                              ▁there     " there"               "there"
    WordPiece (BERT)                            there      " there"               "there"
    none                                        there      " there"               "there"

With these decoders a text is its tokens' bytes, one after another (`is_joined`). With any other
(CTC, BPEDecoder), and with a subclass that decodes in its own way, a token's text depends on its
neighbours, and the bytes here are those of the token alone.

transformers' `clean_up_tokenization_spaces` is left out everywhere, as in vLLM: it removes spaces
that the model has emitted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from outrider.lazy import transformers
from outrider.models.tokens.model_tokenizer import ModelTokenizer

ANCHOR = "a"  # decoded in front of a token, so that the token does not begin the text
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# GPT-2's code: printable Latin-1 characters are their own bytes, the other 68 are the characters
# from 256 on
BYTE_OF_LETTER = {
    **{chr(byte): byte for byte in PRINTABLE},
    **{
        chr(256 + number): byte
        for number, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
    },
}


@dataclass(frozen=True)
class DecoderShape:
    """The rules of a decoder's configuration for the bytes of single tokens."""

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    implies_spaces: bool = False  # words are joined by spaces that no token contains
    treats_first_apart: bool = False  # the token that begins a text is decoded in another way
    strip: bytes = b""  # removed from the beginning of the whole text ...
    max_strips: int = 0  # ... up to this many times
    rewrites: bool = False  # tokens are rewritten one by one
    is_fused: bool = False  # later stages see the whole text, not single tokens


class TokenBytes:
    """Bytes of single tokens of one tokenizer. Get it from `token_bytes`."""

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer.backend_tokenizer
        self._id_to_token = backend.id_to_token
        self._decoder = backend.decoder
        self.special_ids = frozenset(
            number for number, token in backend.get_added_tokens_decoder().items() if token.special
        )
        shape = decoder_shape(
            None if self._decoder is None else json.loads(self._decoder.__getstate__())
        )
        self.is_joined = shape is not None and _decodes_plainly(tokenizer)
        self.shape = shape or DecoderShape()
        self._anchor = None if shape is None else self._decode(ANCHOR)
        self._known: dict[int, bytes] = {}

    def has(self, token: int) -> bool:
        """Whether the vocabulary names this id: an output head may have more rows."""
        return self._id_to_token(token) is not None

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token that does not begin a text; empty for an id that the vocabulary does not
        name."""
        name = self._known.get(token)
        if name is None:
            name = self._known[token] = self._compute(token, is_first=False)
        return name

    def bytes_at_start(self, token: int) -> bytes:
        """Bytes of a token that is the first of a text, before `shape.strip` is removed."""
        return (
            self._compute(token, is_first=True)
            if self.shape.treats_first_apart
            else self.bytes_of(token)
        )

    def name(self, token: int) -> str:
        """The token for people and for keys of JSON; bytes that are no text are written as OpenAI
        does, 'bytes:\\xe2'."""
        return (
            str(self._id_to_token(token))
            if token in self.special_ids
            else show_bytes(self.bytes_of(token))
        )

    def _compute(self, token: int, *, is_first: bool) -> bytes:
        written = self._id_to_token(token)
        if written is None:
            return b""
        if self.shape.is_byte_level:
            codes = [BYTE_OF_LETTER.get(letter) for letter in written]
            return (
                written.encode()
                if None in codes
                else bytes(code for code in codes if code is not None)
            )
        if self.shape.has_byte_fallback and (match := BYTE_TOKEN.fullmatch(written)):
            return bytes([int(match[1], 16)])
        if is_first or self._anchor is None:
            return self._decode(written)
        return self._decode(ANCHOR, written).removeprefix(self._anchor)

    def _decode(self, *written: str) -> bytes:
        return (
            " ".join(written) if self._decoder is None else self._decoder.decode(list(written))
        ).encode()


_FOUND: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The tokenizer's `TokenBytes`, made once; None for a tokenizer in Python code, which has no
    decoder to read."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = TokenBytes(tokenizer)
    return _FOUND[tokenizer]


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that a text leaves out unless it is to show special tokens."""
    known = token_bytes(tokenizer)
    if known is not None:
        return known.special_ids
    added = (token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def decoded(tokenizer: Any, ids: Sequence[int], *, special: bool) -> str:
    """The tokenizer's own text of some tokens, with every space that they have."""
    return str(
        tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
    )


def token_name(tokenizer: Any, token: int) -> str:
    """One token for people: its text, the bytes of an unfinished character, or '#N' for an id
    without a name."""
    table = token_bytes(tokenizer)
    text = decoded(tokenizer, [token], special=True) if table is None else table.name(token)
    if table is None and (not text or "\ufffd" in text):
        text = str(tokenizer.convert_ids_to_tokens(token) or "")
    return text or f"#{token}"


def show_bytes(data: bytes) -> str:
    """Bytes as text; as OpenAI writes them, 'bytes:\\xe2', where they are no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def decoder_shape(state: dict[str, Any] | None) -> DecoderShape | None:
    """Reads the configuration of a decoder; None where the bytes of a text are not those of its
    tokens, joined."""
    shape: DecoderShape | None = DecoderShape()
    if state is None:
        return DecoderShape(implies_spaces=True, treats_first_apart=True)
    for stage in _stages(state):
        shape = shape and _with_stage(shape, stage)
    return shape


def _stages(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoder's stages, nested sequences flattened."""
    if state["type"] != "Sequence":
        return [state]
    return [stage for inner in state["decoders"] for stage in _stages(inner)]


def _with_stage(shape: DecoderShape, stage: dict[str, Any]) -> DecoderShape | None:
    whole = shape.is_fused
    bytewise = shape.is_fused or shape.has_byte_fallback
    match stage["type"]:
        case "Fuse":
            return replace(shape, is_fused=True)
        case "ByteLevel" if shape == DecoderShape():
            return replace(shape, is_byte_level=True, is_fused=True)
        case "ByteFallback" if not bytewise:
            return replace(shape, has_byte_fallback=True)
        case "Strip" if whole and not (
            shape.max_strips or shape.treats_first_apart or stage["stop"]
        ):
            return replace(shape, strip=stage["content"].encode(), max_strips=stage["start"])
        case "WordPiece" if shape == DecoderShape():
            return replace(shape, implies_spaces=True, treats_first_apart=True)
        case "Metaspace" if not bytewise:
            return replace(shape, rewrites=True, treats_first_apart=True)
        case "Replace" | "Strip" if not bytewise:
            return replace(shape, rewrites=True)
        case _:
            return None


def _decodes_plainly(tokenizer: Any) -> bool:
    """Whether this tokenizer decodes by its tokenizer.json alone."""
    if isinstance(tokenizer, ModelTokenizer):
        return True
    kind = type(tokenizer)
    plain: Any = transformers.PreTrainedTokenizerFast
    return (
        getattr(kind, "decode", None) is plain.decode
        and getattr(kind, "_decode", None) is plain._decode
    )
