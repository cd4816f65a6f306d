"""Values that models write without quotes: the schema decides what they mean."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.serve.tools.values import converted, parameter, types_of

ROOT = {
    "properties": {"city": {"type": "string"}},
    "additionalProperties": {"type": "integer"},
    "$defs": {"unit": {"enum": ["C", "F"]}, "self": {"$ref": "#/$defs/self"}, "a/b": {"type": "null"}},
}
TYPES: list[tuple[Any, set[str]]] = [
    ({"type": "integer"}, {"integer"}),
    ({"type": ["string", "null"]}, {"string", "null"}),
    ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}, {"type": "array"}]}]}, {"integer", "null", "array"}),
    ({"$ref": "#/$defs/unit"}, {"string"}),
    ({"allOf": [{"$ref": "#/$defs/unit"}], "default": "C"}, {"string"}),
    ({"$ref": "#/$defs/a~1b"}, {"null"}),
    ({"enum": ["a", 1, None, 2.5]}, {"string", "integer", "null", "number"}),
    ({"const": True}, {"boolean"}),
    ({"properties": {}}, {"object"}),
    ({"items": {}}, {"array"}),
    ({"type": "int32"}, {"integer"}),
    ({"type": "float"}, {"number"}),
    ({"type": "varchar"}, {"string"}),
    ({"$ref": "#/$defs/self"}, {"string"}),
    ({"$ref": "elsewhere.json"}, {"string"}),
    ({}, {"string"}),
    (True, {"string"}),
    (None, {"string"}),
]


@pytest.mark.parametrize(("schema", "types"), TYPES)
def test_types(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_alternatives_that_contain_themselves_end() -> None:
    root: dict[str, Any] = {"$defs": {"tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "array"}]}}}
    assert types_of({"$ref": "#/$defs/tree"}, root) == {"array"}


def test_parameters_that_are_not_declared() -> None:
    assert parameter(ROOT, "city") == {"type": "string"}
    assert parameter(ROOT, "days") == {"type": "integer"}
    assert types_of(parameter({}, "days"), {}) == {"string"}


VALUES: list[tuple[str, set[str], Any]] = [
    ("Paris", {"string"}, "Paris"),
    ("3", {"string"}, "3"),
    ("null", {"string"}, "null"),
    ("null", {"string", "null"}, None),
    ("Null", {"integer"}, None),
    ("3", {"integer"}, 3),
    ("three", {"integer"}, "three"),
    ("3", {"string", "integer"}, 3),
    ("3.5", {"number"}, 3.5),
    ("3.0", {"number"}, 3),
    ("12345678901234567890", {"number"}, 12345678901234567890),
    ("1e999", {"number"}, "1e999"),
    ("nan", {"number"}, "nan"),
    ("True", {"boolean"}, True),
    ("false", {"boolean"}, False),
    ("yes", {"boolean"}, "yes"),
    ('{"a": [1]}', {"object"}, {"a": [1]}),
    ("{'a': (1, None)}", {"object"}, {"a": (1, None)}),
    ("[1, 2", {"array"}, "[1, 2"),
    ("{1, 2}", {"array"}, "{1, 2}"),
    ("[1e999]", {"array"}, "[1e999]"),
    ('"quoted"', {"string", "object"}, '"quoted"'),
    ("[" * 5000 + "]" * 5000, {"array"}, "[" * 5000 + "]" * 5000),
    ("9" * 5000, {"integer", "number"}, "9" * 5000),
]


@pytest.mark.parametrize(("text", "types", "value"), VALUES)
def test_values(text: str, types: set[str], value: Any) -> None:
    """Catches a value that the schema does not allow, one made up, and texts that json and ast choke on."""
    found = converted(text, frozenset(types))
    assert (found, type(found)) == (value, type(value))
