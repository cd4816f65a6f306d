"""Grammars of answers that are tool calls, or may be, in llguidance's Lark: one per way of writing
calls.

Every way is one rule `body`: what stands after the opening mark. An enforced call is the mark and
the body. Where the model is free, text runs until the mark is complete (a lazy terminal, or the
mark's own token), and only the body is held.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import RequestError
from outrider.grammar import Spec
from outrider.serve.tools.formats import CALL, CALL_END, PYTHON_TAG, SEP, Tags, ToolFormat
from outrider.serve.tools.lark import ANY, choice, json_of, quoted_regex, without, written
from outrider.serve.tools.parameters import arguments, functions_in_python, functions_in_tags

Functions = Sequence[Mapping[str, Any]]
Marks = Mapping[str, int]
# an answer of Llama 3 that is a text
NO_CALL = r"/[ \t\r\n]*[^ \t\r\n{](.|\n)*/ & ~/[ \t\r\n]*<\|python_tag\|>(.|\n)*/"


def calls_grammar(
    form: ToolFormat, functions: Functions, marks: Marks, *, single: bool, free: bool
) -> str:
    """One call of these functions, or several. `marks`: texts of the format that are one token.
    `free`: other text may stand around calls or in their place, and only strict functions are held
    to their schemas. Raises CapabilityError for a schema that calls of this kind cannot be held to.
    """
    if free:
        functions = [
            f if f.get("strict") else {**f, "parameters": {"type": "object"}} for f in functions
        ]
    if form.name == "pythonic":
        return _lines(functions_in_python(functions, single=single, free=free))
    if form.name == "llama3":
        return _lines(_bare(form, functions, marks, single, free))
    body, between = _body(form, functions, marks, single)
    opening = written(form.opening, marks)
    more = "" if single or between is None else f" ({between} {opening} body)*"
    if not free:
        return _lines([f"start: {opening} body{more}", *body])
    return _lines(_free(form, body, marks, more))


def calls_or_answer(
    form: ToolFormat, functions: Functions, marks: Marks, answer: Spec, *, single: bool
) -> str:
    """Calls, or content of a given form. Raises RequestError for a form that is a whole grammar of
    its own."""
    match answer.form:
        case "json_schema":
            content = "%json " + answer.text
        case "regex":
            content = quoted_regex(answer.text)
        case "choice":
            content = choice([json.dumps(option) for option in json.loads(answer.text)])
        case _:
            raise RequestError(
                f"{answer.name} together with tools: a grammar and calls cannot be put together; use "
                "tool_choice 'none'"
            )
    calls = calls_grammar(form, functions, marks, single=single, free=False)
    return f"{calls.replace('start:', 'calls:', 1)}start: calls | answer\nanswer: {content}\n"


def _lines(rules: Sequence[str]) -> str:
    return "\n".join([*rules, ""])


def _body(
    form: ToolFormat, functions: Functions, marks: Marks, single: bool
) -> tuple[list[str], str | None]:
    """(rules, what stands before another opening mark, or None where there is only one for all
    calls)."""
    if form.tags is not None:
        return _tagged(form, form.tags, functions, marks)
    match form.name:
        case "hermes":
            return [
                f'body: "\\n" {json_of(_any_call(form, functions))} "\\n" {written(form.closing, marks)}'
            ], '"\\n"'
        case "deepseek":
            return _deepseek(form, functions, marks, single), None
        case "mistral" if form.has_args:
            calls = [
                f"{written(f['name'] + '[ARGS]', marks)} {json_of(arguments(f))}" for f in functions
            ]
            return [f"body: {choice(calls)}"], ""
        case _:
            limits = {"maxItems": 1} if single else {}
            return [
                f"body: {json_of({'type': 'array', 'minItems': 1, **limits, 'items': _any_call(form, functions)})}"
            ], None


def _free(form: ToolFormat, body: Sequence[str], marks: Marks, more: str) -> list[str]:
    """Any text, in which a call must follow its mark. Nothing follows calls that have no closing
    mark. Where text may follow, so may another mark and call; readers leave out what is one too
    many."""
    mark = form.opening
    held = "body"
    # some models leave the opening mark away, and readers allow for it
    if form.tags is not None and form.tags.name[0]:
        mark = form.tags.name[0]
        held = "function"
        body = body[1:]
    if mark in marks:
        rules = [f"mark: TEXT {written(mark, marks)}", f"TEXT: {without([mark])}", *body]
    else:
        rules = [f"mark[lazy]: TEXT {json.dumps(mark)}", f"TEXT: {ANY}", *body]
    if not form.closing:
        return [f"start: TEXT | mark body{more}", *rules]
    others = [
        str(marks[text])
        for text in (form.opening, form.closing)
        if text in marks and held == "function"
    ]
    if others:
        return [
            f"start: (mark {held} | other)* TEXT",
            f"other: TEXT <[{','.join(others)}]>",
            *rules,
        ]
    return [f"start: (mark {held})* TEXT", *rules]


def _any_call(form: ToolFormat, functions: Functions) -> dict[str, Any]:
    """Schema of {"name": ..., "arguments": ...}."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                form.arguments: arguments(function),
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _tagged(
    form: ToolFormat, tags: Tags, functions: Functions, marks: Marks
) -> tuple[list[str], str]:
    before = written((tags.gap if tags.name[0] else "") + tags.name[0], marks)
    closing = "" if tags.end == form.closing else written(tags.gap + form.closing, marks)
    return [
        f"body: {before} function {closing}",
        *functions_in_tags(tags, functions, marks),
    ], written(tags.gap, marks)


def _deepseek(form: ToolFormat, functions: Functions, marks: Marks, single: bool) -> list[str]:
    """All calls between one pair of marks."""
    before, then, after = (
        ("function" + SEP, "\n```json\n", "\n```") if form.is_fenced else ("", SEP, "")
    )
    calls = [
        f"{written(CALL + before + f['name'] + then, marks)} {json_of(arguments(f))} {written(after + CALL_END, marks)}"
        for f in functions
    ]
    between = '"\\n" ' if form.is_fenced else ""
    more = "" if single else f" ({between}call)*"
    return [f"body: call{more} {written(form.closing, marks)}", f"call: {choice(calls)}"]


def _bare(
    form: ToolFormat, functions: Functions, marks: Marks, single: bool, free: bool
) -> list[str]:
    """Calls in place of an answer: a text then must not begin as they do."""
    more = "" if single else ' ("; " call)*'
    call = f"call: {json_of(_any_call(form, functions))}"
    if not free:
        return [f"start: call{more}", call]
    tag = f"{written(PYTHON_TAG, marks)}? " if PYTHON_TAG in marks else ""
    return [f"start: TEXT? | {tag}call{more}", f"TEXT: {NO_CALL}", call]
