"""What a grammar can be given as. A `Spec` is plain data: made without the library, checked when it meets a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import RequestError

Form = Literal["json_schema", "regex", "choice", "ebnf", "lark"]
SPACE = r"[ \t\r\n]{0,32}"  # between JSON's parts. Room for indented text; without an end a weak model writes nothing else


@dataclass(frozen=True)
class Spec:
    """A grammar before it is compiled."""

    form: Form
    text: str
    name: str  # the request's field it came from, for messages: "response_format.json_schema.schema"


def json_schema(schema: Mapping[str, Any] | bool, name: str = "schema", *, whitespace: str | None = None) -> Spec:
    """JSON that a schema describes. `whitespace`: a regex for what may stand between its parts, "" for nothing (None: SPACE)."""
    if not isinstance(schema, Mapping | bool):
        raise RequestError(f"{name} must be a JSON schema (an object), got {json.dumps(schema)[:80]}")
    text = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    spaced = {"whitespace_flexible": False} if whitespace == "" else {"whitespace_pattern": whitespace or SPACE}
    if whitespace is not None or "x-guidance" not in text:
        text["x-guidance"] = spaced
    return Spec("json_schema", json.dumps(text), name)


def json_object(name: str = "response_format") -> Spec:
    """Any JSON object."""
    return json_schema({"type": "object"}, name)


def regex(pattern: str, name: str = "regex") -> Spec:
    """Text that a regular expression matches from beginning to end (the syntax of Rust's regex crate, no look-around)."""
    return Spec("regex", _text(pattern, name, "a regular expression"), name)


def choice(options: Sequence[str], name: str = "choice") -> Spec:
    """One of some texts."""
    if isinstance(options, str) or not isinstance(options, Sequence) or not all(isinstance(o, str) and o for o in options):
        raise RequestError(f"{name} must be a list of non-empty strings, got {json.dumps(options)[:80]}")
    if not options:
        raise RequestError(f"{name} is empty: there would be nothing to answer")
    return Spec("choice", json.dumps(list(options)), name)


def ebnf(text: str, name: str = "grammar") -> Spec:
    """A context-free grammar in llama.cpp's GBNF (`root ::= ...`) or in Lark (`start: ...`), whichever it is."""
    return Spec("ebnf", _text(text, name, "a grammar"), name)


def lark(text: str, name: str = "grammar") -> Spec:
    """A context-free grammar in llguidance's Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""
    return Spec("lark", _text(text, name, "a grammar"), name)


def _text(value: Any, name: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{name} must be {what} (a non-empty string), got {json.dumps(value)[:80]}")
    return value
