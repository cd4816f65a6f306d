"""What form an answer must have, in OpenAI's and vLLM's words, as one grammar `Spec`.

    spec = wanted_form(response_format={"type": "json_object"})          # None: any text
    grammars = Grammars(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)    # once per engine, outrider/grammar
    Request(..., constraint=None if spec is None else grammars.constraint(spec))      # fresh for every answer of n

`grammars.constraint` is where a wrong grammar is found: RequestError, beginning with the field's name. Fields are plain JSON
values (pydantic's `model_dump(by_alias=True, exclude_none=True)`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import RequestError, did_you_mean
from outrider.grammar import Spec, choice, ebnf, json_object, json_schema, regex

FORMATS = ("text", "json_object", "json_schema")
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
HOW = ("disable_any_whitespace", "whitespace_pattern")  # of vLLM's structured_outputs


def wanted_form(
    *,
    response_format: Mapping[str, Any] | None = None,
    structured_outputs: Mapping[str, Any] | None = None,
    guided_json: Any = None,
    guided_regex: str | None = None,
    guided_choice: list[str] | None = None,
    guided_grammar: str | None = None,
    allowed_token_ids: list[int] | None = None,
) -> Spec | None:
    """The one form that is asked for. Raises RequestError for two, for an unknown one, and beside `allowed_token_ids`."""
    found = {
        "response_format": None if response_format is None else _response_format(response_format),
        "structured_outputs": None if structured_outputs is None else _structured(structured_outputs),
        "guided_json": None if guided_json is None else _schema(guided_json, "guided_json"),
        "guided_regex": None if guided_regex is None else regex(guided_regex, "guided_regex"),
        "guided_choice": None if guided_choice is None else choice(guided_choice, "guided_choice"),
        "guided_grammar": None if guided_grammar is None else ebnf(guided_grammar, "guided_grammar"),
    }
    asked = {name: spec for name, spec in found.items() if spec is not None}
    if len(asked) > 1:
        raise RequestError(f"{' and '.join(asked)} each ask for a form of the answer: give one")
    if asked and allowed_token_ids is not None:
        raise RequestError(f"allowed_token_ids beside {next(iter(asked))}: together they may leave no token. Give one")
    return next(iter(asked.values()), None)


def _response_format(wanted: Mapping[str, Any]) -> Spec | None:
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object("response_format")
    if kind != "json_schema":
        raise RequestError(f"response_format.type is {json.dumps(kind)}.{did_you_mean(str(kind), FORMATS)}")
    named = wanted.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise RequestError("response_format.json_schema must be an object with 'name' and 'schema'")
    return _schema(named["schema"], "response_format.json_schema.schema")


def _structured(wanted: Mapping[str, Any]) -> Spec:
    """vLLM's `structured_outputs`: one of `STRUCTURED`, and for JSON how much white space."""
    given = {key: value for key, value in wanted.items() if value not in (None, False)}
    unknown = sorted(set(given) - {*STRUCTURED, *HOW})
    if unknown:
        raise RequestError(f"structured_outputs.{unknown[0]} is not known.{did_you_mean(unknown[0], (*STRUCTURED, *HOW))}")
    kinds = [key for key in given if key in STRUCTURED]
    if len(kinds) != 1:
        got = ", ".join(kinds) or "none"
        raise RequestError(f"structured_outputs must have exactly one of {', '.join(STRUCTURED)}, got {got}")
    kind, name = kinds[0], f"structured_outputs.{kinds[0]}"
    if set(given) & set(HOW) and not kind.startswith("json"):
        raise RequestError(f"{name} has no white space of its own: leave out {' and '.join(sorted(set(given) & set(HOW)))}")
    if len(set(given) & set(HOW)) > 1:
        raise RequestError("structured_outputs.whitespace_pattern and disable_any_whitespace contradict each other: give one")
    space = "" if given.get("disable_any_whitespace") else given.get("whitespace_pattern")
    match kind:
        case "json":
            return _schema(given[kind], name, space)
        case "json_object":
            return json_schema({"type": "object"}, name, whitespace=space)
        case "regex":
            return regex(given[kind], name)
        case "choice":
            return choice(given[kind], name)
        case _:
            return ebnf(given[kind], name)


def _schema(value: Any, name: str, whitespace: str | None = None) -> Spec:
    """A schema as an object or, as vLLM takes it, as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is no JSON: {error}") from error
    return json_schema(value, name, whitespace=whitespace)
