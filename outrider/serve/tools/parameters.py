"""Grammars of calls that give their arguments one by one: as Python's keywords, or between tags.

A text between tags has no quotes and no escapes, so some rules of a schema cannot be enforced. A
strict tool with such a rule is refused by name (CapabilityError); one that is not strict is held to
the rest.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import CapabilityError, RequestError
from outrider.serve.tools.formats import Tags
from outrider.serve.tools.lark import ANY, choice, json_of, without, written
from outrider.serve.tools.values import TEXT, alternatives, as_json, options_of, types_of

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ONE_BY_ONE = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
SAYS_NOTHING = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "$schema",
    "$id",
    "$comment",
}
OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength"}
JSON_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
Function = Mapping[str, Any]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function."""

    name: str
    schema: Any
    is_required: bool
    function: Function

    @property
    def root(self) -> Mapping[str, Any]:
        return arguments(self.function)

    @property
    def json(self) -> str:
        """Grammar of a value as JSON."""
        whole = dict(self.schema) if isinstance(self.schema, Mapping) else {}
        return json_of(
            whole | {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        )

    def refusal(self, why: str) -> CapabilityError:
        return CapabilityError(f"tools: parameter '{self.name}' of '{self.function['name']}' {why}")


def arguments(function: Function) -> Mapping[str, Any]:
    """The schema of a function's arguments; none at all where it names none."""
    return function.get("parameters") or NO_ARGUMENTS


def parameters_of(function: Function) -> list[Parameter] | None:
    """The parameters in their order; None where any may be given. Raises CapabilityError for a
    strict function with other rules.
    """
    schema = arguments(function)
    if schema.get("properties") is None:
        return [] if schema.get("additionalProperties") is False else None
    required = schema.get("required") or []
    missing = [name for name in required if name not in schema["properties"]]
    other = sorted(set(schema) - ONE_BY_ONE - SAYS_NOTHING)
    if function.get("strict") and (other or missing):
        what = f"say '{other[0]}'" if other else f"require '{missing[0]}' and do not describe it"
        raise CapabilityError(
            f"tools: the parameters of '{function['name']}' {what}, which calls of this model, "
            "one parameter after the other, "
            "cannot be held to. Say all of it in 'properties' and 'required', or leave out strict"
        )
    return [
        Parameter(name, part, name in required, function)
        for name, part in schema["properties"].items()
    ]


# ---------------------------------------------------------------- Python


def functions_in_python(functions: Sequence[Function], *, single: bool, free: bool) -> list[str]:
    """A list of calls; with `free`, or any text that does not begin as one."""
    numbers = range(len(functions))
    names = [f'"{function["name"]}("' for function in functions]
    words = [
        f"words_{n}: {_words(parameters_of(function))}" for n, function in enumerate(functions)
    ]
    if any("(loose" in line for line in words):
        words += [f'loose: WORD "=" {json_of({})}', "WORD: /[A-Za-z_][A-Za-z0-9_]*/"]
    calls = [
        f"call: {choice([f'call_{n}' for n in numbers])}",
        *(f'call_{n}: {names[n]} words_{n} ")"' for n in numbers),
    ]
    more = "" if single else ' (", " call)*'
    if not free:
        return [f'start: "[" call{more} "]"', *calls, *words]
    first = choice([f'begin_{n} words_{n} ")"' for n in numbers])
    begins = [f'begin_{n}[lazy]: BLANK "[" BLANK {names[n]}' for n in numbers]
    texts = [r"BLANK: /[ \t\r\n]*/", f"TEXT: {ANY}"]
    return [
        f'start: TEXT | first{more} "]"',
        f"first: {first}",
        *begins,
        *texts,
        *([] if single else calls),
        *words,
    ]


def _words(parameters: Sequence[Parameter] | None) -> str:
    """Required ones in order, then any of the optional ones in order, with commas between."""
    if parameters is None:
        return '(loose (", " loose)*)?'
    required = [_word(parameter) for parameter in parameters if parameter.is_required]
    optional = [_word(parameter) for parameter in parameters if not parameter.is_required]
    if required:
        return " ".join([' ", " '.join(required), *(f'(", " {word})?' for word in optional)])
    starts = [
        " ".join([word, *(f'(", " {later})?' for later in optional[index + 1 :])])
        for index, word in enumerate(optional)
    ]
    return f"({choice(starts)})?" if starts else '""'


def _word(parameter: Parameter) -> str:
    """name=value, the value as JSON: what the reader takes alongside Python's own words."""
    if not parameter.name.isidentifier() or keyword.iskeyword(parameter.name):
        raise parameter.refusal(
            "cannot be an argument in Python, as which this model writes its calls: rename it"
        )
    return f'"{parameter.name}=" {parameter.json}'


# ---------------------------------------------------------------- tags


def functions_in_tags(
    tags: Tags, functions: Sequence[Function], marks: Mapping[str, int]
) -> list[str]:
    """Rules of `function`: everything from the name on to the end of the call."""
    names = choice([f"function_{n}" for n in range(len(functions))])
    rules = [f"function: {names}"]
    for n, function in enumerate(functions):
        parameters = parameters_of(function)
        given = ["given*"] if parameters is None else []
        for k, parameter in enumerate(parameters or []):
            given.append(f"given_{n}_{k}{'' if parameter.is_required else '?'}")
            rules += _given(f"{n}_{k}", parameter, tags, marks)
        parts = (
            written(function["name"] + tags.name[1], marks),
            *given,
            written(tags.gap + tags.end, marks),
        )
        rules.append(f"function_{n}: {' '.join(parts)}")
    if any("given*" in rule for rule in rules):
        key = written(tags.gap + tags.key[0], marks)
        lead = written(_lead(tags), marks)
        rules += [f"given: {key} KEY {lead} text", r"KEY: /[^<>\n]+/"]
    if any(rule.endswith(" text") for rule in rules):
        rules += _text("text", "ANYTHING", ANY, tags.also_end, tags.value[1], marks)
    return rules


def _lead(tags: Tags) -> str:
    """The text between the name of a parameter and its value."""
    return (
        tags.key[1]
        + (tags.gap + tags.value[0] if tags.value[0] else "")
        + ("\n" if tags.lined else "")
    )


def _given(number: str, parameter: Parameter, tags: Tags, marks: Mapping[str, int]) -> list[str]:
    """Rules of one parameter."""
    if (
        tags.key[1] in parameter.name
        or parameter.name != parameter.name.strip()
        or "\n" in parameter.name
    ):
        raise parameter.refusal("cannot stand in a tag, in which this model writes it: rename it")
    lead = f"{written(tags.gap + tags.key[0], marks)} {json.dumps(parameter.name)} {written(_lead(tags), marks)}"
    after = ("\n" if tags.lined else "") + tags.value[1]
    types = types_of(parameter.schema, parameter.root)
    parts = alternatives(parameter.schema, parameter.root)
    if parameter.function.get("strict") and (
        strange := [part["type"] for part in parts if _is_strange(part.get("type"))]
    ):
        raise RequestError(
            f"tools: parameter '{parameter.name}' has the type {strange[0]!r}, which JSON schema "
            "does not know"
        )
    if "string" not in types:
        return [f"given_{number}: {lead} {parameter.json} {written(after, marks)}"]
    options = [option for part in parts for option in _options(part)]
    if all(_options(part) for part in parts):
        texts = [option if isinstance(option, str) else as_json(option) for option in options]
        if wrong := [text for text in texts if any(end in text for end in tags.ends)]:
            raise parameter.refusal(
                f"has the option {wrong[0]!r}, which would end its own tag: rename it"
            )
        return [
            f"given_{number}: {lead} ({choice([json.dumps(text) for text in texts])}) {written(after, marks)}"
        ]
    bounds = _bounds(parameter, parts, types)
    if not bounds:
        return [f"given_{number}: {lead} text"]
    # without any "<": counting letters and looking out for tags at once is more than llguidance's
    # lexer has fuel for
    rules = _text(f"text_{number}", f"BOUNDED_{number}", f"/[^<]{bounds}/", (), after, marks)
    return [f"given_{number}: {lead} text_{number}", *rules]


def _is_strange(kind: Any) -> bool:
    names = kind if isinstance(kind, list) else [kind]
    return any(name is not None and name not in JSON_TYPES for name in names)


def _options(part: Mapping[str, Any]) -> list[Any]:
    """All values of a schema, where there are few."""
    return [None] if part.get("type") == "null" else options_of(part) or []


def _bounds(parameter: Parameter, parts: Sequence[Mapping[str, Any]], types: frozenset[str]) -> str:
    """The allowed length of a text as a regular expression's count; "" for any length. Raises
    CapabilityError where a strict function has other rules for it.
    """
    texts = [part for part in parts if "string" in types_of(part, parameter.root)]
    other = sorted({key for part in texts for key in part} - OF_TEXTS - SAYS_NOTHING)
    if parameter.function.get("strict"):
        if other:
            raise parameter.refusal(
                f"is a text with '{other[0]}', which this model's calls cannot be held to: it "
                "writes texts without quotes. "
                "Leave it out, or leave out strict"
            )
        if types - TEXT - {"null"} or len(texts) > 1:
            raise parameter.refusal(
                "may be a text or something else, and this model writes texts without quotes, so "
                "nothing would tell them "
                "apart. Give it one type, or leave out strict"
            )
    if len(texts) > 1:
        return ""
    low, high = (texts[0].get(key) for key in ("minLength", "maxLength"))
    for name, bound in (("minLength", low), ("maxLength", high)):
        if bound is not None and (not isinstance(bound, int) or bound < 0):
            raise RequestError(
                f"tools: {name} of parameter '{parameter.name}' must be a whole number, got "
                f"{bound!r}"
            )
    return "" if low is None and high is None else f"{{{low or 0},{'' if high is None else high}}}"


def _text(
    rule: str, terminal: str, of: str, no: Sequence[str], end: str, marks: Mapping[str, int]
) -> list[str]:
    """A text up to the tag that ends it."""
    if marks and any(text in end for text in marks):
        return [
            f"{rule}: {terminal} {written(end, marks)}",
            f"{terminal}: {of if of != ANY else without([*no, end])}",
        ]
    return [
        f"{rule}[lazy]: {terminal} {written(end, {})}",
        f"{terminal}: {without(no) if no else of}",
    ]
