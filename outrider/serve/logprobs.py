"""Log-probabilities in the two shapes of OpenAI's API. They are the target's own: temperature 1, no filters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from outrider.serve.token_bytes import TokenBytes

LEAST = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have

Law = dict[int, float]  # token id -> log-probability, likeliest first


class Namer:
    """How tokens are called: by their text, or as 'token_id:N' where asked for."""

    def __init__(self, tokens: TokenBytes, *, as_ids: bool) -> None:
        self._tokens = tokens
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokens.text(token)

    def bytes_of(self, token: int) -> bytes:
        return self._tokens.of(token)


class CompletionLogprobs:
    """`logprobs` of a completion's choice: parallel lists, with each token's place in the choice's text."""

    def __init__(self, name: Namer, count: int) -> None:
        self._name, self._count = name, count
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], laws: Sequence[Law | None], text: str) -> dict[str, Any]:
        """Of an echoed prompt. Nothing comes before its first token, so that has no probability."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces, offset = [], 0
        for token in token_ids:
            piece = decoder.decode(self._name.bytes_of(token))
            pieces.append(piece if text.startswith(piece, offset) else "")  # begin tokens are not in the text
            offset += len(pieces[-1])
        found = self.answer(token_ids, laws, pieces)
        self._offset = len(text)
        return found

    def answer(self, token_ids: Sequence[int], laws: Sequence[Law | None], pieces: Sequence[str]) -> dict[str, Any]:
        """Of new tokens, `pieces` being the text that each released."""
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(piece)
        return {
            "tokens": [self._name(token) for token in token_ids],
            "token_logprobs": [None if law is None else finite(law[token]) for token, law in zip(token_ids, laws, strict=True)],
            "top_logprobs": [None if law is None else self._top(law) for law in laws] if self._count else None,
            "text_offset": offsets,
        }

    def _top(self, law: Law) -> dict[str, float]:
        """Up to `count` + 1: the token that was said is always there."""
        return {self._name(token): finite(value) for token, value in law.items()}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several pieces of one choice's `logprobs` as one."""
    first, *others = parts
    whole = dict(first)
    for part in others:
        whole = {name: None if values is None else values + part[name] for name, values in whole.items()}
    return whole


def chat_logprobs(name: Namer, token_ids: Sequence[int], laws: Sequence[Law], count: int) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry a token, with its bytes and exactly the `count` likeliest."""
    content = []
    for token, law in zip(token_ids, laws, strict=True):
        top = [_entry(name, other, value) for other, value in list(law.items())[:count]]
        content.append({**_entry(name, token, law[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(name: Namer, laws: Sequence[Law | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id."""
    return [
        None if law is None else {str(t): {"logprob": finite(v), "decoded_token": name(t)} for t, v in law.items()}
        for law in laws
    ]


def _entry(name: Namer, token: int, value: float) -> dict[str, Any]:
    return {"token": name(token), "logprob": finite(value), "bytes": list(name.bytes_of(token))}


def finite(value: float) -> float:
    """JSON has no minus infinity."""
    return max(value, LEAST)
