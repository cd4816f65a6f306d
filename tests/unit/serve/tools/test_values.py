"""Values that models write without quotes: the schema decides what they mean."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.serve.tools.values import converted, parameter, types_of
from outrider.wellformed import MAX_DEPTH, parsed_json

ROOT = {
    "properties": {"city": {"type": "string"}},
    "additionalProperties": {"type": "integer"},
    "$defs": {
        "unit": {"enum": ["C", "F"]},
        "self": {"$ref": "#/$defs/self"},
        "a/b": {"type": "null"},
    },
}
TYPES: list[tuple[Any, set[str]]] = [
    ({"type": "integer"}, {"integer"}),
    ({"type": ["string", "null"]}, {"string", "null"}),
    (
        {"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}, {"type": "array"}]}]},
        {"integer", "null", "array"},
    ),
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
    root: dict[str, Any] = {
        "$defs": {"tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "array"}]}}
    }
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
    ("00501", {"string", "integer"}, "00501"),
    ("2024_01", {"string", "integer"}, "2024_01"),
    ("2024_01", {"string", "number"}, "2024_01"),
    ("+49", {"string", "integer"}, "+49"),
    ("٣", {"string", "integer"}, "٣"),
    (" 5", {"string", "integer"}, " 5"),
    ("3.0", {"string", "integer"}, "3.0"),
    ("1.", {"string", "number"}, "1."),
    (".5", {"string", "number"}, ".5"),
    ("-7", {"string", "integer"}, -7),
    ("-0.5e1", {"string", "number"}, -5),
    ("12345678901234567890", {"string", "integer"}, 12345678901234567890),
    ("NaN", {"string", "number"}, "NaN"),
    ("Infinity", {"string", "number"}, "Infinity"),
    ("True", {"string", "boolean"}, "True"),
    ("true", {"string", "boolean"}, True),
    ("true", {"string", "integer"}, "true"),
    ("Null", {"string", "null"}, "Null"),
    ("NULL", {"string", "integer", "null"}, "NULL"),
    ("{'a': 1}", {"string", "object"}, "{'a': 1}"),
    ('\n{"a": 1}\n', {"string", "object"}, {"a": 1}),
    ("[1]", {"string", "object"}, "[1]"),
    ("1e25", {"number"}, 1e25),
    ("1e16", {"string", "number"}, 1e16),
    ("[" * 5000 + "]" * 5000, {"array"}, "[" * 5000 + "]" * 5000),
    ("[" * 201 + "]" * 201, {"array"}, "[" * 201 + "]" * 201),
    ("9" * 5000, {"integer", "number"}, "9" * 5000),
]


@pytest.mark.parametrize(("text", "types", "value"), VALUES)
def test_values(text: str, types: set[str], value: Any) -> None:
    """Catches a value that the schema does not allow, one made up, and texts that json and ast
    choke on."""
    found = converted(text, frozenset(types))
    assert (found, type(found)) == (value, type(value))


def test_how_deep_json_may_be_nested() -> None:
    """The limit is ours, not that of each Python; brackets in strings do not count."""
    for opening, closing, value in (("[", "]", []), ('{"a":', "}", 1)):
        inner = "" if value == [] else "1"
        deepest = parsed_json(opening * MAX_DEPTH + inner + closing * MAX_DEPTH)
        for _ in range(MAX_DEPTH - (value == [])):
            (deepest,) = deepest if isinstance(deepest, list) else deepest.values()
        assert deepest == value
        with pytest.raises(ValueError, match="nested deeper than 200"):
            parsed_json(opening * (MAX_DEPTH + 1) + inner + closing * (MAX_DEPTH + 1))
    assert len(parsed_json("[" + "[[]]," * 300 + "[]]")) == 301
    assert parsed_json('["' + '[{\\"' * 300 + '"]') == ['[{"' * 300]
