"""Grammars as a caller may give them. A `Spec` is plain data: made without the library, checked
when it meets a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import RequestError
from outrider.sampling.structured import StructuredOutputsParams
from outrider.wellformed import parsed_json

Form = Literal["json_schema", "regex", "choice", "ebnf", "lark"]
# Between the parts of JSON. With more room a model that is not sure what comes next writes blanks;
# with none at the end of a number one that would continue with a blank writes digits without end
SPACE = "[ ]?"
# llguidance's options about it
WHITESPACE = ("whitespace_pattern", "whitespace_flexible", "item_separator", "key_separator")


@dataclass(frozen=True)
class Spec:
    """A grammar before it is compiled."""

    form: Form
    text: str
    # the request's field it came from, for messages: "response_format.json_schema.schema"
    name: str


def json_schema(
    schema: Mapping[str, Any] | bool, name: str = "schema", *, whitespace: str | None = None
) -> Spec:
    """JSON that a schema describes. `whitespace`: a regex for what may stand between its parts, ""
    for nothing.

    None: as the schema's own `x-guidance` says, else at most one blank in each place (SPACE).
    """
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"{name} must be a JSON schema (an object), got {json.dumps(schema)[:80]}"
        )
    if schema is False:
        raise RequestError(f"{name} is false, a schema that no answer fulfils")
    text = dict(schema) if isinstance(schema, Mapping) else {}
    options = text.get("x-guidance", {})
    if isinstance(options, Mapping):
        text["x-guidance"] = _spaced(options, whitespace)
    return Spec("json_schema", json.dumps(text), name)


def _spaced(options: Mapping[str, Any], whitespace: str | None) -> dict[str, Any]:
    """A schema's options for llguidance with white space as it was asked for."""
    if whitespace is None and any(name in options for name in WHITESPACE):
        return dict(options)
    others = {name: value for name, value in options.items() if name not in WHITESPACE}
    return {
        **others,
        **(
            {"whitespace_flexible": False}
            if whitespace == ""
            else {"whitespace_pattern": whitespace or SPACE}
        ),
    }


def json_object(name: str = "response_format") -> Spec:
    """Any JSON object."""
    return json_schema({"type": "object"}, name)


def regex(pattern: str, name: str = "regex") -> Spec:
    """Text that a regular expression matches from beginning to end (the syntax of Rust's regex
    crate, no look-around)."""
    return Spec("regex", _text(pattern, name, "a regular expression"), name)


def choice(options: Sequence[str], name: str = "choice") -> Spec:
    """One of some texts."""
    if (
        isinstance(options, str)
        or not isinstance(options, Sequence)
        or not all(isinstance(o, str) and o for o in options)
    ):
        raise RequestError(
            f"{name} must be a list of non-empty strings, got {json.dumps(options)[:80]}"
        )
    if not options:
        raise RequestError(f"{name} is empty: there would be nothing to answer")
    return Spec("choice", json.dumps(list(options)), name)


def ebnf(text: str, name: str = "grammar") -> Spec:
    """A context-free grammar in llama.cpp's GBNF (`root ::= ...`) or in Lark (`start: ...`),
    whichever it is."""
    return Spec("ebnf", _text(text, name, "a grammar"), name)


def lark(text: str, name: str = "grammar") -> Spec:
    """A context-free grammar in llguidance's Lark:
    https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""
    return Spec("lark", _text(text, name, "a grammar"), name)


def form_of(wanted: StructuredOutputsParams, name: str | None = None) -> Spec:
    """The grammar of a form in vLLM's words; messages about it begin with `name`. Raises
    RequestError for what is no schema, pattern or list."""
    name = name or f"structured_outputs.{wanted.kind}"
    space = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if wanted.json is not None:
        return schema_form(wanted.json, name, space)
    if wanted.regex is not None:
        return regex(wanted.regex, name)
    if wanted.choice is not None:
        return choice(wanted.choice, name)
    if wanted.grammar is not None:
        return ebnf(wanted.grammar, name)
    return json_schema({"type": "object"}, name, whitespace=space)


def schema_form(value: Any, name: str, whitespace: str | None = None) -> Spec:
    """A schema as an object or, as vLLM takes it, as text."""
    if isinstance(value, str):
        try:
            value = parsed_json(value)
        except ValueError as error:
            raise RequestError(f"{name} is no JSON: {error}") from error
    return json_schema(value, name, whitespace=whitespace)


def _text(value: Any, name: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RequestError(
            f"{name} must be {what} (a non-empty string), got {json.dumps(value)[:80]}"
        )
    return value
