"""Small pieces of llguidance's Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) for tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.grammar import json_schema

ANY = r"/(.|\n)*/"


def written(text: str, marks: Mapping[str, int]) -> str:
    """Text of a format, with those of its marks that are one token by their numbers."""
    if not marks:
        return json.dumps(text) if text else ""
    longest = sorted(marks, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest))})", text)
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part
    )


def json_of(schema: Mapping[str, Any]) -> str:
    """JSON that a schema describes."""
    return "%json " + json_schema(schema).text


def without(texts: Sequence[str]) -> str:
    """A terminal in which none of some texts occurs."""
    ending = "|".join(re.escape(text).replace("/", r"\/") for text in texts)
    return rf"{ANY} & ~/(.|\n)*({ending})(.|\n)*/"


def quoted_regex(pattern: str) -> str:
    """Between slashes, on one line; what is escaped already stays as it is."""
    inside = re.sub(
        r"\\.|/", lambda found: found[0] if len(found[0]) == 2 else r"\/", pattern, flags=re.DOTALL
    )
    return "/" + inside.replace("\n", r"\n") + "/"


def choice(rules: Sequence[str]) -> str:
    return " | ".join(rules)
