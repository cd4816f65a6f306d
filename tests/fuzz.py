"""Files that somebody has altered: values of JSON replaced, bytes changed, cut or repeated, by a
seeded generator."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

NUMBERS = (0, 1, -1, 2, 3, 7, 8, 255, 577, 4096, 2**31 - 1, 2**31, 2**40, 2**63, -(2**63), 10**30)
TEXTS = ("", "a", "../../a", "float16", "\ud800")
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [1, "a"],
    {"a": 1},
    [[[]]],
)
VALUES = (*NUMBERS, *TEXTS, *OTHERS)


def altered(content: Any, chance: random.Random) -> tuple[Any, str]:
    """A copy of a JSON value with one place in it changed, and words for the change."""
    content = copy.deepcopy(content)
    places = list(_places(content))
    holder, key, path = chance.choice(places)
    value = holder[key]
    kind = chance.random()
    if kind < 0.4 and type(value) is int:
        new: Any = value + chance.choice((-1, 1, -value, value, 16, -16, 1 << 20))
    elif kind < 0.4 and isinstance(value, str) and len(value) > 20:
        new = _altered_text(value, chance)
    elif kind < 0.5:
        del holder[key]
        return content, f"{path} removed"
    elif kind < 0.6 and isinstance(value, list) and value:
        new = [*value, copy.deepcopy(chance.choice(value))] if chance.random() < 0.5 else value[:-1]
    elif kind < 0.7:
        new = copy.deepcopy(chance.choice(places)[0])
    else:
        new = chance.choice(VALUES)
    holder[key] = new
    return content, f"{path}: {str(value)[:40]} -> {str(new)[:40]!a}"


def _altered_text(text: str, chance: random.Random) -> str:
    """The text with one number in it replaced, where it has any, or one letter."""
    spans = [match.span() for match in re.finditer(r"\d+", text)]
    if spans and chance.random() < 0.7:
        begin, end = chance.choice(spans)
        return text[:begin] + str(chance.choice(NUMBERS)) + text[end:]
    place = chance.randrange(len(text))
    return text[:place] + chance.choice("aA0'[]{},:=+/\0") + text[place + 1 :]


def _places(content: Any, path: str = "") -> Any:
    """(holder, key, path) of every value inside."""
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in items:
        yield content, key, f"{path}/{key}"
        yield from _places(value, f"{path}/{key}")


def altered_bytes(
    content: bytes, chance: random.Random, end: int | None = None
) -> tuple[bytes, str]:
    """A copy of a file with a few bytes in front of `end` changed, a number there replaced, or a
    part cut out."""
    place = chance.randrange(end or len(content))
    kind = chance.random()
    if kind < 0.4:
        new = bytes([chance.choice((0, 1, 2, 8, 0x7F, 0xFF, chance.randrange(256)))])
        return content[:place] + new + content[place + 1 :], f"byte {place} -> {new[0]}"
    if kind < 0.8:
        size = chance.choice((2, 4, 8))
        number = chance.choice(NUMBERS) % (1 << 8 * size)
        return content[:place] + number.to_bytes(size, "little") + content[
            place + size :
        ], f"{size} bytes at {place} -> {number}"
    if kind < 0.9:
        return content[:place], f"cut at {place}"
    return content[:place] + content[place + chance.randrange(1, 16) :], f"bytes missing at {place}"
