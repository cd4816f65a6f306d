"""Tokens and their log-probabilities as servers write them into an answer, in either of OpenAI's
shapes.

A completion has parallel lists (`tokens`, `token_logprobs`, `top_logprobs`), a chat one entry a
token (`content`); llama.cpp writes the second everywhere. What is in neither shape counts as not
given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer. `others`: of the likeliest tokens there, by the bytes they stand
    for; the token itself may be among them."""

    text: bytes
    logprob: float
    others: dict[bytes, float] = field(default_factory=dict)


def logprobs_of(value: Any) -> list[TokenLogprob]:
    """The tokens of one `logprobs` field; none where it is empty or in another shape."""
    try:
        if not isinstance(value, dict):
            return []
        return list(_of_chat(value["content"]) if value.get("content") else _of_completion(value))
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def _of_chat(content: list[dict[str, Any]]) -> Iterator[TokenLogprob]:
    for entry in content:
        others = {_bytes(other): _number(other["logprob"]) for other in entry["top_logprobs"] or ()}
        yield TokenLogprob(_bytes(entry), _number(entry["logprob"]), others)


def _bytes(entry: dict[str, Any]) -> bytes:
    """The bytes that a token adds to the text: as they are given, else those of its name."""
    given = entry.get("bytes")
    return bytes(given) if isinstance(given, list) else str(entry["token"]).encode()


def _of_completion(value: dict[str, Any]) -> Iterator[TokenLogprob]:
    several = zip_longest(value["tokens"], value["token_logprobs"], value["top_logprobs"] or ())
    for token, logprob, tops in several:
        others = {str(name).encode(): _number(other) for name, other in (tops or {}).items()}
        yield TokenLogprob(str(token).encode(), _number(logprob), others)


def _number(value: Any) -> float:
    """A log-probability. Raises ValueError or TypeError for what is none."""
    number = float(value)
    if math.isnan(number) or number > 1e-3:
        raise ValueError(f"{number} is no log-probability")
    return number


def gap_at(
    tokens: list[TokenLogprob], text: str, other: str, position: int
) -> tuple[float, bool] | None:
    """How much likelier `text`'s token at the character `position` was than the one that `other`
    has there, in nats.

    True beside it: the other token was not among those given, and the gap is at least this. None:
    there are no log-probabilities, they are of another text, or one of the texts ends there.
    """
    whole, found = text.encode(), other.encode()
    place = len(text[:position].encode())
    if place >= len(whole) or place >= len(found):
        return None
    begin = 0
    for token in tokens:
        end = begin + len(token.text)
        if whole[begin:end] != token.text:
            return None  # of another text, or bytes are written as a mark
        if begin <= place < end:
            return _gap(token, found[begin:])
        begin = end
    return None


def _gap(token: TokenLogprob, found: bytes) -> tuple[float, bool] | None:
    """The token against the longest of the others that the found text goes on with."""
    others = {name: value for name, value in token.others.items() if name != token.text}
    fitting = [name for name in others if name and found.startswith(name)]
    if fitting:
        return token.logprob - others[max(fitting, key=len)], False
    return (token.logprob - min(others.values()), True) if others else None
