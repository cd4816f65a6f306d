"""Log-probabilities in the two shapes of OpenAI's API. They are the target's own: temperature 1, no
filters.

A token is named by the text it adds where it stands, so the tokens' bytes joined are the bytes of
the answer. Only tokens that the text does not show (an end token) are named all the same, without
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.models.tokens.token_bytes import TokenBytes, show_bytes
from outrider.text import Detokenizer

MIN_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have
NEAR = 8  # characters of a prompt that its tokenizer may have dropped before a token

Logprobs = dict[int, float]  # token id -> log-probability, likeliest first


class Namer:
    """How tokens are called: by their text, or as 'token_id:N' where asked for."""

    def __init__(self, tokens: TokenBytes, *, as_ids: bool) -> None:
        self.tokens = tokens
        self._as_ids = as_ids

    def __call__(self, token: int, text: Detokenizer | None = None) -> str:
        """`text`: the text that the token continues; None: any."""
        if self._as_ids:
            return f"token_id:{token}"
        return (
            self.tokens.name(token)
            if text is None or text.hides(token)
            else show_bytes(text.bytes_of(token))
        )


class LogprobLists:
    """`logprobs` of a completion's choice: parallel lists, with each token's position in the
    choice's text."""

    def __init__(self, name: Namer, count: int, text: Detokenizer) -> None:
        """`text`: the answer's, at its beginning."""
        self._name = name
        self._count = count
        self._text = text
        self._begin = 0  # of the answer, after an echoed prompt

    def prompt(
        self,
        token_ids: Sequence[int],
        all_logprobs: Sequence[Logprobs | None],
        shown: str,
        text: Detokenizer,
    ) -> dict[str, Any]:
        """Lists for an echoed prompt. `shown`: how it is echoed; `text`: an empty text that shows
        special tokens."""
        found = self._empty()
        offset = 0
        for token, logprobs in zip(token_ids, all_logprobs, strict=True):
            special = token in self._name.tokens.special_ids
            if special and not shown.startswith(
                text.bytes_of(token).decode(errors="replace"), offset
            ):
                self._add(found, token, logprobs, offset)  # a begin token, which is not in the text
                continue
            piece = self._add(found, token, logprobs, offset, text)
            if piece and (near := shown.find(piece, offset, offset + len(piece) + NEAR)) >= 0:
                found["text_offset"][-1] = offset = near
            offset += len(piece)
        self._begin = len(shown)
        return found

    def answer(
        self,
        token_ids: Sequence[int],
        all_logprobs: Sequence[Logprobs | None],
        end: int | None = None,
    ) -> dict[str, Any]:
        """Lists for new tokens. `end`: length of the whole text, where it is known: tokens after a
        stop string stand there."""
        found = self._empty()
        for token, logprobs in zip(token_ids, all_logprobs, strict=True):
            offset = self._begin + self._text.num_characters
            self._add(
                found, token, logprobs, offset if end is None else min(offset, end), self._text
            )
        return found

    def _empty(self) -> dict[str, Any]:
        return {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [] if self._count else None,
            "text_offset": [],
        }

    def _add(
        self,
        found: dict[str, Any],
        token: int,
        logprobs: Logprobs | None,
        offset: int,
        text: Detokenizer | None = None,
    ) -> str:
        """Write one token into the lists and push it; returns the text it completes."""
        found["tokens"].append(self._name(token, text))
        found["token_logprobs"].append(None if logprobs is None else finite(logprobs[token]))
        found["text_offset"].append(offset)
        if self._count:
            found["top_logprobs"].append(
                None if logprobs is None else self._top(token, logprobs, text)
            )
        return "" if text is None else text.push(token)

    def _top(self, token: int, logprobs: Logprobs, text: Detokenizer | None) -> dict[str, float]:
        """Up to `count` + 1: the emitted token is always there, and of other tokens with equal
        names the likeliest."""
        tops: dict[str, float] = {}
        for other, value in logprobs.items():
            tops.setdefault(self._name(other, text), finite(value))
        return tops | {self._name(token, text): finite(logprobs[token])}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several pieces of one choice's `logprobs` as one."""
    first, *others = parts
    whole = dict(first)
    for part in others:
        whole = {
            name: None if values is None else values + part[name] for name, values in whole.items()
        }
    return whole


def chat_logprobs(
    name: Namer,
    text: Detokenizer,
    token_ids: Sequence[int],
    all_logprobs: Sequence[Logprobs],
    count: int,
) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry a token, with its bytes and exactly the `count`
    likeliest. Pushes to `text`."""
    content = []
    for token, logprobs in zip(token_ids, all_logprobs, strict=True):
        top = [_entry(name, text, other, value) for other, value in list(logprobs.items())[:count]]
        content.append({**_entry(name, text, token, logprobs[token]), "top_logprobs": top})
        text.push(token)
    return {"content": content, "refusal": None}


def prompt_logprobs(
    name: Namer, all_logprobs: Sequence[Logprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id."""
    return [
        None
        if logprobs is None
        else {str(t): {"logprob": finite(v), "decoded_token": name(t)} for t, v in logprobs.items()}
        for logprobs in all_logprobs
    ]


def _entry(name: Namer, text: Detokenizer, token: int, value: float) -> dict[str, Any]:
    return {
        "token": name(token, text),
        "logprob": finite(value),
        "bytes": list(text.bytes_of(token)),
    }


def finite(value: float) -> float:
    """JSON has no minus infinity."""
    return max(value, MIN_LOGPROB)
