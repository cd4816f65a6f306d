"""Numbers in JSON schemas that no answer could be held to.

llguidance reads every number as a float and every bound of whole numbers as one of 64 bits: larger
ones would be rounded without a word, and -2^63 ends the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.errors import RequestError

MAX_EXACT = 2**53 - 1  # whole numbers up to here are exact in every JSON library (RFC 8259)
MAX_INT64 = 2**63 - 1  # as the largest whole number it is exact, too, and many schemas say it
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
INLINE = re.compile(r"%json[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def refuse_inexact(schema: Any, name: str) -> None:
    """Raise RequestError for a bound, or a whole number among the values, that would be rounded.
    `name`: of the schema."""
    waiting: list[tuple[str, Any, bool]] = [(name, schema, False)]
    while waiting:
        path, part, is_value = waiting.pop()
        if isinstance(part, Mapping):
            for key, inner in part.items():
                if (
                    key in BOUNDS
                    and isinstance(inner, int | float)
                    and not _is_held(part, key, inner)
                ):
                    raise _refusal(f"{path}.{key}", inner)
                waiting.append((f"{path}.{key}", inner, is_value or key in ("const", "enum")))
        elif isinstance(part, list):
            waiting += [(f"{path}.{number}", inner, is_value) for number, inner in enumerate(part)]
        elif is_value and isinstance(part, int) and abs(part) > MAX_EXACT:
            raise _refusal(path, part)


def schemas_in(lark: str) -> Iterator[Any]:
    """The JSON schemas inside a grammar."""
    for start in INLINE.finditer(lark):
        try:
            yield _DECODER.raw_decode(lark, start.end())[0]
        except (ValueError, RecursionError):  # llguidance will say so
            continue


def _is_held(part: Mapping[str, Any], key: str, bound: float) -> bool:
    is_int64 = key == "maximum" and bound == MAX_INT64 and "exclusiveMaximum" not in part
    return abs(bound) <= MAX_EXACT or (is_int64 and "number" not in str(part.get("type", "number")))


def _refusal(path: str, number: float) -> RequestError:
    return RequestError(
        f"{path} is {number}, and an answer can be held to whole numbers up to {MAX_EXACT} (2^53 "
        "- 1) only: leave it out, "
        "or ask for a text"
    )
