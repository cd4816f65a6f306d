"""OpenAI's and vLLM's words for the form of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import ConfigError, RequestError
from outrider.grammar import choice, ebnf, json_object, json_schema, regex
from outrider.serve.api.response_format import wanted_form

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FULL = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, json_object()),
        ({"response_format": FULL}, json_schema(SCHEMA, "response_format.json_schema.schema")),
        ({"guided_json": SCHEMA}, json_schema(SCHEMA, "guided_json")),
        ({"guided_json": '{"type": "null"}'}, json_schema({"type": "null"}, "guided_json")),
        ({"guided_regex": "a+"}, regex("a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, choice(["a", "b"], "guided_choice")),
        ({"guided_grammar": 'root ::= "a"'}, ebnf('root ::= "a"', "guided_grammar")),
        (
            {"structured_outputs": {"regex": "a+", "json": None}},
            regex("a+", "structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_fallback": False}},
            regex("a", "structured_outputs.regex"),
        ),
        ({"structured_outputs": {"choice": ["a"]}}, choice(["a"], "structured_outputs.choice")),
        (
            {"structured_outputs": {"grammar": "start: /a/"}},
            ebnf("start: /a/", "structured_outputs.grammar"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            json_object("structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            json_schema(SCHEMA, "structured_outputs.json", whitespace=""),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            json_schema(SCHEMA, "structured_outputs.json", whitespace=" ?"),
        ),
        ({"allowed_token_ids": [1]}, None),
    ],
)
def test_forms(fields: dict[str, Any], expected: Any) -> None:
    assert wanted_form(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"response_format": {"type": "json_shema"}}, "Did you mean 'json_schema'"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema must be an object",
        ),
        (
            {"response_format": FULL, "guided_regex": "a"},
            "response_format and guided_regex each ask",
        ),
        ({"guided_json": "{"}, "guided_json is no JSON"),
        ({"guided_json": [1]}, "guided_json must be a JSON schema"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "got json, regex"),
        (
            {"structured_outputs": {"json": False, "regex": None}},
            "structured_outputs.json is false",
        ),
        ({"guided_json": False}, "guided_json is false"),
        ({"structured_outputs": {"regex": False}}, "regex must be a text, got False"),
        ({"structured_outputs": {"regexp": "a"}}, "Did you mean 'regex'"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag is not known"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "no white space of its own",
        ),
        (
            {
                "structured_outputs": {
                    "json": {},
                    "whitespace_pattern": " ",
                    "disable_any_whitespace": True,
                }
            },
            "contradict",
        ),
        ({"guided_regex": "a", "allowed_token_ids": [3]}, "may leave no token"),
    ],
)
def test_refusals(fields: dict[str, Any], match: str) -> None:
    """Catches an option that is accepted and ignored."""
    with pytest.raises((RequestError, ConfigError), match=match):
        wanted_form(**fields)
