"""The types that a parameter's schema allows for a value without quotes, and so the meaning of the
value.

Qwen's own parser is the model for it (qwen3coder_tool_parser.py alongside Qwen3-Coder's weights): a
text stays as it is, other types are read, and what cannot be read stays the text that was written.
It looks at `type` alone; here references and alternatives count as well. Three things differ,
because the schema demands it: "null" stays a text where only a text is allowed, what is neither
true nor false stays a text, where Qwen's makes it false, and where a text is allowed besides
others, only JSON is one of those: 00501, 2024_01 and True stay texts.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from outrider.wellformed import is_text, parsed_json

TEXT = frozenset(["string"])
LARGEST_EXACT = 2**53  # of the whole numbers that a float may stand for
MAX_REFERENCES = 20  # one after the other; more is a circle
# what json and ast raise for odd texts
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
BEGINNINGS = (  # types as tools in the wild call them
    ("null", ("null", "none")), ("integer", ("int", "uint", "long", "short", "unsigned")),
    ("number", ("num", "float", "double")), ("boolean", ("bool", "binary")),
    ("object", ("obj", "dict")), ("array", ("arr", "list")),
)  # fmt: skip
OF_VALUES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}


def parameter(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of one parameter; that of additional ones where it is not declared."""
    properties = schema.get("properties") or {}
    return properties[name] if name in properties else schema.get("additionalProperties")


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Schemas of which one holds, after references into `root`. A schema that allows everything,
    or is none, is {}."""
    schemas: list[Mapping[str, Any]] = []
    seen: set[int] = set()  # schemas may contain themselves
    waiting = [schema]
    while waiting:
        part = resolved(waiting.pop(0), root)
        if id(part) in seen:
            continue
        seen.add(id(part))
        listed = part.get("anyOf", part.get("oneOf"))
        if isinstance(listed, list) and listed:
            waiting = [*listed, *waiting]
        else:
            schemas.append(part)
    return schemas


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference stands for, and the one part of `allOf`."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        parts = schema.get("allOf")
        if isinstance(parts, list) and len(parts) == 1 and "type" not in schema:
            schema = parts[0]
        elif isinstance(schema.get("$ref"), str):
            schema = _at(schema["$ref"], root)
        else:
            return schema
    return {}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON's names of the types that a value may have; a text where the schema has none."""
    return frozenset(kind for part in alternatives(schema, root) for kind in _types(part)) or TEXT


def options_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values there are, where a schema lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def converted(text: str, types: frozenset[str]) -> Any:
    """The value that a text means, as one of the types."""
    if "string" in types:
        return _json_or_text(text, types)
    if text.strip().lower() == "null":
        return None
    for kind, read in READERS.items():
        if kind in types:
            try:
                value = read(text)
                as_json(value)
            except UNREADABLE:
                continue
            return value
    return text


def as_json(value: Any) -> str:
    """JSON that can be sent. Raises ValueError or TypeError for what is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def _json_or_text(text: str, types: frozenset[str]) -> Any:
    """The value of JSON of one of the types; the text itself where it is none."""
    try:
        value = parsed_json(text)
        as_json(value)
    except UNREADABLE:
        return text
    kind = OF_VALUES.get(type(value))
    if kind not in types and not (kind == "integer" and "number" in types):
        return text
    if text != text.strip() and kind not in ("object", "array"):
        return text
    return _whole(value) if isinstance(value, float) else value


def _types(schema: Mapping[str, Any]) -> list[str]:
    """The types of a schema without alternatives."""
    named = schema.get("type")
    if isinstance(named, str | list):
        return [_known(str(name)) for name in ([named] if isinstance(named, str) else named)]
    options = options_of(schema)
    if options is not None:
        return [OF_VALUES.get(type(option), "string") for option in options]
    return ["object" if "properties" in schema else "array" if "items" in schema else "string"]


def _known(name: str) -> str:
    low = name.strip().lower()
    return next((kind for kind, beginnings in BEGINNINGS if low.startswith(beginnings)), "string")


def _at(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of `#/$defs/name`; None where nothing is there."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        node = (
            node.get(step.replace("~1", "/").replace("~0", "~"))
            if isinstance(node, Mapping)
            else None
        )
    return node


def _integer(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return _whole(value)


def _whole(value: float) -> float:
    """An int where the number is whole, and exact."""
    return int(value) if value.is_integer() and abs(value) <= LARGEST_EXACT else value


def _boolean(text: str) -> bool:
    low = text.strip().lower()
    if low not in ("true", "false"):
        raise ValueError(text)
    return low == "true"


def _nested(text: str) -> Any:
    try:
        return parsed_json(text)
    except ValueError:
        return ast.literal_eval(text.strip())  # some models write Python here


READERS: dict[str, Callable[[str], Any]] = {  # in the order of trying
    "integer": _integer, "number": _number, "boolean": _boolean, "object": _nested, "array": _nested,
}  # fmt: skip
