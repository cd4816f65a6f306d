"""Grammars of answers that must be tool calls, in llguidance's Lark, one per way of writing them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import CapabilityError, RequestError
from outrider.grammar import Spec
from outrider.serve.tools_formats import ToolFormat

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
SPACE = {"x-guidance": {"whitespace_pattern": "[ ]?"}}  # calls are written on one line


def calls_grammar(
    form: ToolFormat, functions: Sequence[Mapping[str, Any]], specials: Mapping[str, int], *, single: bool, free: bool
) -> str:
    """One call of these functions, or several. `specials`: texts that are one special token. `free`: other text may stand
    around calls, and only what is marked as a call is held to a schema. Raises CapabilityError where that is not possible."""
    if free:
        return _free(form, functions, specials)
    more = "" if single else "*"
    match form.name:
        case "hermes":
            rest = "" if single else ' ("\\n" call)*'
            return f"start: call{rest}\n{_hermes(form, functions, specials)}"
        case "mistral" if form.has_args:
            return _mistral_args(form, functions, specials, more)
        case "mistral":
            most = {"maxItems": 1} if single else {}
            calls = {"type": "array", "minItems": 1, **most, "items": _any_call(form, functions)}
            return f"start: {_written(form.opening, specials)} {_json(calls)}\n"
        case "llama3":
            rest = "" if single else ' ("; " call)*'
            return f"start: call{rest}\ncall: {_json(_any_call(form, functions))}\n"
        case _:
            return _pythonic(functions, single)


def calls_or_answer(
    form: ToolFormat, functions: Sequence[Mapping[str, Any]], specials: Mapping[str, int], answer: Spec, *, single: bool
) -> str:
    """Calls, or content of a given form. Raises RequestError for a form that is a whole grammar of its own."""
    match answer.form:
        case "json_schema":
            content = "%json " + answer.text
        case "regex":
            content = _quoted_regex(answer.text)
        case "choice":
            content = " | ".join(json.dumps(option) for option in json.loads(answer.text))
        case _:
            raise RequestError(f"{answer.name} beside tools: a grammar and calls cannot be put together; use tool_choice 'none'")
    calls = calls_grammar(form, functions, specials, single=single, free=False)
    return f"{calls.replace('start:', 'calls:', 1)}start: calls | answer\nanswer: {content}\n"


def _any_call(form: ToolFormat, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Schema of {"name": ..., "arguments": ...}."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, form.arguments: _arguments(function)},
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; none at all where it names none."""
    return function.get("parameters") or NO_ARGUMENTS


def _hermes(form: ToolFormat, functions: Sequence[Mapping[str, Any]], specials: Mapping[str, int]) -> str:
    opening, closing = _written(form.opening, specials), _written(form.closing, specials)
    return f'call: {opening} "\\n" {_json(_any_call(form, functions))} "\\n" {closing}\n'


def _mistral_args(form: ToolFormat, functions: Sequence[Mapping[str, Any]], specials: Mapping[str, int], more: str) -> str:
    opening, args = _written(form.opening, specials), _written("[ARGS]", specials)
    rules = [f"call_{n}: {opening} {json.dumps(f['name'])} {args} {_json(_arguments(f))}" for n, f in enumerate(functions)]
    names = " | ".join(f"call_{n}" for n in range(len(functions)))
    return "\n".join([f"start: call{' call*' if more else ''}", f"call: {names}", *rules, ""])


def _free(form: ToolFormat, functions: Sequence[Mapping[str, Any]], specials: Mapping[str, int]) -> str:
    """Any text, in which the mark of a call must be followed by one."""
    if form.name != "hermes":
        raise CapabilityError(
            f"tools: strict with tool_choice auto is for models that mark calls as Hermes does; this one writes {form.name}. "
            "Use tool_choice required, or leave out strict"
        )
    schemas = [f if f.get("strict") else {**f, "parameters": {"type": "object"}} for f in functions]
    body = f'"\\n" {_json(_any_call(form, schemas))} "\\n" {_written(form.closing, specials)}'
    text = "start: call* rest\nrest: TEXT\nTEXT: /(.|\\n)*/\n"
    if form.opening in specials:
        return f"{text}call: TEXT {_written(form.opening, specials)} {body}\n"
    return f"{text}mark[lazy]: TEXT {json.dumps(form.opening)}\ncall: mark {body}\n"


def _pythonic(functions: Sequence[Mapping[str, Any]], single: bool) -> str:
    rest = "" if single else ' (", " call)*'
    lines = [f'start: "[" call{rest} "]"', f"call: {' | '.join(f'call_{n}' for n in range(len(functions)))}"]
    for number, function in enumerate(functions):
        schema = _arguments(function)
        required = [name for name in schema.get("properties", {}) if name in schema.get("required", [])]
        optional = [name for name in schema.get("properties", {}) if name not in required]
        words = {name: _word(name, schema) for name in [*required, *optional]}
        lines.append(f'call_{number}: "{function["name"]}(" {_words(words, required, optional)} ")"')
    return "\n".join([*lines, ""])


def _word(name: str, schema: Mapping[str, Any]) -> str:
    """name=value, the value as JSON: what the parser reads beside Python's own words."""
    value = dict(schema["properties"][name])
    value |= {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return f"{json.dumps(name + '=')} {_json(value)}"


def _words(words: Mapping[str, str], required: Sequence[str], optional: Sequence[str]) -> str:
    """Required ones in order, then any of the optional ones in order, with commas between."""
    fixed = ' ", " '.join(words[name] for name in required)
    if required:
        return " ".join([fixed, *(f'(", " {words[name]})?' for name in optional)])
    starts = [
        " ".join([words[name], *(f'(", " {words[later]})?' for later in optional[place + 1 :])])
        for place, name in enumerate(optional)
    ]
    return f"({' | '.join(starts)})?" if starts else ""


def _quoted_regex(pattern: str) -> str:
    """Between slashes, on one line; what is escaped already stays as it is."""
    inside = re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) == 2 else r"\/", pattern, flags=re.DOTALL)
    return "/" + inside.replace("\n", r"\n") + "/"


def _written(text: str, specials: Mapping[str, int]) -> str:
    return f"<[{specials[text]}]>" if text in specials else json.dumps(text)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, **SPACE})
