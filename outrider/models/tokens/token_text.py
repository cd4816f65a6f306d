"""The text of one tokenizer's tokens: of a few of them in context, the tokens of a text, a token's
own bytes.

Two habits of tokenizers are handled here, so that code that translates between two of them need not
know them:

* a leading space may belong to the token (byte-level BPE), be stripped from the first token of a
  text (SentencePiece), or
  be implied between words: text is decoded after the tokens before it, and what those say is taken
  off;
* SentencePiece puts a space before every text it encodes: a continuation is encoded after a line
  end, whose tokens are
  then taken off.

What a token's string means (`Ġ`, `▁`, `<0x0A>`) is read from the decoder by `token_bytes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.models.tokens.bytes_text import MAX_UNFINISHED, UNFINISHED, BytesText
from outrider.models.tokens.token_bytes import decoded, special_ids, token_bytes
from outrider.templates import conversation_text

GUARD = "\n"  # encoded before a text that continues another
SPACES = b" \t\r\n"
ANSWER = "Outrider's answer"  # looked for in what a chat template writes
END_OF_WORD = "</w>"  # what vocabularies of the first BPE put after a word's last letters


class TokenText:
    """One tokenizer, asked about pieces of a longer text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = token_bytes(tokenizer)
        self.specials = special_ids(tokenizer)
        self.keys = token_keys(tokenizer, self.specials)
        self._guard = self._encode(GUARD)
        bos = tokenizer.bos_token_id
        begins = tokenizer("", add_special_tokens=True)["input_ids"]
        # what this tokenizer begins every text with
        self.prefix = [bos] if bos is not None and begins == [bos] else []

    def text(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text that `ids` add to the tokens before them. `UNFINISHED` stands where bytes make
        no character, and at the beginning when the tokens before end in the middle of one."""
        if self._bytes is not None and self._bytes.is_joined:
            text = BytesText(self._bytes, before)
            begun = UNFINISHED if text.is_unfinished else ""
            if begun:
                text.flush()
            return begun + "".join([text.push(token) for token in ids]) + text.flush()
        if not before or not ids:
            return self._decode(ids)
        known = self._decode(before)
        whole = self._decode([*before, *ids])
        if known.endswith(UNFINISHED) or not whole.startswith(known):
            return UNFINISHED + self._decode(ids)
        return whole[len(known) :]

    def ids(self, text: str, *, continues: bool) -> list[int]:
        """Tokens of a text, without special ones around it. `continues`: it stands after other
        text."""
        if continues:
            guarded = self._encode(GUARD + text)
            # else the line end grew together with the text
            if guarded[: len(self._guard)] == self._guard:
                return guarded[len(self._guard) :]
        return self._encode(text)

    def num_unfinished(self, ids: Sequence[int], before: Sequence[int] = ()) -> int:
        """How many of the last tokens begin a character that is not complete yet. 0 as well where
        no character can be."""
        if not self.text(ids, before).endswith(UNFINISHED):
            return 0
        for count in range(1, min(MAX_UNFINISHED, len(ids)) + 1):
            if not self.text(ids[: len(ids) - count], before).endswith(UNFINISHED):
                return count
        return 0

    def begins_word(self, token: int) -> bool:
        """Whether it starts with exactly one space: a place where nearly every tokenizer starts a
        new token, too."""
        key = self.keys.get(token)
        if isinstance(key, tuple):
            return key[0] == "word"
        return (
            key is not None and key[:1] == b" " and key[1:2] not in (b" ", b"\t", b"\r", b"\n", b"")
        )

    def ends_in_space(self, token: int) -> bool:
        key = self.keys.get(token)
        return isinstance(key, bytes) and key[-1:] != b"" and key[-1:] in SPACES

    def _decode(self, ids: Sequence[int]) -> str:
        return decoded(self._tokenizer, ids, special=True) if ids else ""

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


Key = bytes | tuple[str, str]


def token_keys(tokenizer: Any, specials: frozenset[int]) -> dict[int, Key]:
    """Token id -> what it says: equal keys say the same in any two vocabularies.

    The bytes inside a text where the decoder can be read, else (kind, string): special tokens, and
    all tokens of a tokenizer in Python code.
    """
    known = token_bytes(tokenizer)
    keys: dict[int, Key] = {}
    for string, token in tokenizer.get_vocab().items():
        if token in specials:
            keys[token] = ("special", string)
        elif known is None:
            keys[token] = ("part" if string.startswith("##") else "word", string)
        else:
            keys[token] = known.bytes_of(token)
    return keys


def vocabulary_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The text of each of the first `vocab_size` tokens in the middle of a text; empty for ids
    without a name.

    Words of vocabularies that imply the spaces between them are written with the space before them,
    or after them where they end in `</w>`.
    """
    keys = token_keys(tokenizer, special_ids(tokenizer))
    ends_words = any(
        isinstance(key, tuple) and key[1].endswith(END_OF_WORD) for key in keys.values()
    )
    texts = [b""] * vocab_size
    for token, key in keys.items():
        if token < vocab_size:
            texts[token] = key if isinstance(key, bytes) else _implied(*key, ends_words).encode()
    return texts


def _implied(kind: str, string: str, ends_words: bool) -> str:
    if kind == "special":
        return string
    if ends_words:
        return string.removesuffix(END_OF_WORD) + " " * string.endswith(END_OF_WORD)
    return string.removeprefix("##") if kind == "part" else " " + string


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that the chat template writes after an answer, which may be another than the
    eos_token; else that one."""
    eos: int | None = tokenizer.eos_token_id
    if not getattr(tokenizer, "chat_template", None):
        return eos
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = conversation_text(tokenizer, turns)
    except Exception:  # noqa: BLE001  templates are programs, and some refuse such a conversation
        return eos
    _, mark, rest = text.rpartition(ANSWER)
    ends = [
        token
        for token, entry in tokenizer.added_tokens_decoder.items()
        if rest.lstrip().startswith(entry.content)
    ]
    return (
        max(ends, key=lambda token: len(tokenizer.added_tokens_decoder[token].content))
        if mark and ends
        else eos
    )
