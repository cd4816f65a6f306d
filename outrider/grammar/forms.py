"""From the form that an answer must have, in vLLM's words, to one grammar `Spec`."""

from __future__ import annotations

import json
from typing import Any

from outrider.errors import RequestError
from outrider.grammar.specs import Spec, choice, ebnf, json_schema, regex
from outrider.sampling.structured import StructuredOutputsParams


def form_of(wanted: StructuredOutputsParams, name: str | None = None) -> Spec:
    """The grammar of a form; messages about it begin with `name`. Raises RequestError for what is no schema, pattern or list."""
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
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is no JSON: {error}") from error
    return json_schema(value, name, whitespace=whitespace)
