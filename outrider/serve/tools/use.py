"""Tools in a chat: rendered by the model's own template, enforced by a grammar where asked, and
read back from the answer.

    use = tool_use(tools, tool_choice, parallel_tool_calls, template=texts.chat_template, tokenizer=engine.tokenizer)
    render(..., tools=use.rendered)                          # None for tool_choice "none": the model then knows of no tool
    spec = use.spec_beside(form)                             # None: any text. Else "required", a named or strict tool, or `form`
    reader = use.reader()                                    # one per answer: `push`, `end`, `finish_reason`
    deltas = reader.push("".join(use.texts_of(update.token_ids, update.pieces)))   # {"content": ...}, {"tool_calls": [...]}
    message = {"content": ..., "tool_calls": merged_calls(deltas)}       # what is not streamed

`texts_of` is the update's text by token, with those special tokens written out that begin calls in
some formats, and that text leaves out. Read with `reader.push(update.text)` an answer of such a
model would be content. `tool_use` raises RequestError and CapabilityError, beginning with the
field's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import CapabilityError, RequestError, did_you_mean
from outrider.grammar import Spec
from outrider.serve.tools.formats import ToolFormat, format_of
from outrider.serve.tools.grammar import calls_grammar, calls_or_answer
from outrider.serve.tools.reader import ToolReader

__all__ = ["ToolReader", "ToolUse", "merged_calls", "tool_use"]

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request."""

    # as OpenAI has them: {"type": "function", "function": {"name", "parameters"}}
    tools: tuple[Mapping[str, Any], ...]
    choice: str  # "none", "auto", "required", or "=NAME"
    parallel: bool
    format: ToolFormat
    # texts of the format that are one token, special or not: a grammar asks for the token
    marks: Mapping[str, int]
    # those that are special, which a text leaves out and which count as text here
    written: Mapping[int, str]

    @property
    def rendered(self) -> list[Mapping[str, Any]] | None:
        """For the template."""
        return None if self.choice == "none" else list(self.tools)

    @property
    def is_enforced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice not in ("none", "auto")

    @property
    def spec(self) -> Spec | None:
        """The grammar of the answer; None where the model is free."""
        strict = self.choice == "auto" and any(
            tool["function"].get("strict") for tool in self.tools
        )
        if not self.is_enforced and not strict:
            return None
        chosen = [
            tool["function"]
            for tool in self.tools
            if self.choice in ("auto", "required", "=" + _name(tool))
        ]
        single = not self.parallel or self.choice.startswith("=")
        return Spec(
            "lark",
            calls_grammar(self.format, chosen, self.marks, single=single, free=strict),
            "tools",
        )

    def spec_beside(self, form: Spec | None) -> Spec | None:
        """The grammar of an answer where a response format is asked for, too. It describes content,
        so an answer that must be a call has none to describe, and a free one is either a call or
        has the form. Raises RequestError where the two cannot be put together."""
        if form is None or self.is_enforced:
            return self.spec
        # there, calls stand in a channel of their own
        if self.choice == "none" or self.format.is_harmony:
            return form
        functions = [tool["function"] for tool in self.tools]
        return Spec(
            "lark",
            calls_or_answer(self.format, functions, self.marks, form, single=not self.parallel),
            form.name,
        )

    def reader(self) -> ToolReader:
        """For one answer."""
        known = self.readable
        schemas = {
            _name(tool): tool["function"].get("parameters") or {}
            for tool in self.tools
            if _name(tool) in known
        }
        return ToolReader(self.format, schemas, parallel=self.parallel, called=self.called)

    @property
    def readable(self) -> list[str]:
        """Names of the functions whose calls are separated from text."""
        return [] if self.choice == "none" else [_name(tool) for tool in self.tools]

    @property
    def called(self) -> str:
        """The finish reason of an answer that calls. OpenAI: what had to be this one call simply
        stops."""
        return "stop" if self.choice.startswith("=") else "tool_calls"

    def texts_of(
        self,
        token_ids: Sequence[int],
        pieces: Sequence[str],
        *,
        shown: bool = False,
        stopped: bool = False,
    ) -> list[str]:
        """Text released by each token, with the special tokens of `written` written out unless the
        pieces have them (`shown`).

        `stopped`: the last token is a stop token, whose text nobody sees; a closing mark still ends
        its call."""
        if stopped:
            mark = (
                self.format.closing if token_ids[-1] == self.marks.get(self.format.closing) else ""
            )
            return [*self.texts_of(token_ids[:-1], pieces[:-1], shown=shown), pieces[-1] + mark]
        marks = {} if shown else self.written
        return [
            marks.get(token, "") + piece for token, piece in zip(token_ids, pieces, strict=True)
        ]


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    *,
    template: str | None,
    tokenizer: Any,
    format: str | None = None,
) -> ToolUse | None:
    """The tools of a request, or None without tools. `format` names how the model writes calls;
    None: as its template shows."""
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice asks for a call, but there are no tools")
        return None
    _check(tools)
    if not re.search(r"\btools\b", template or ""):
        raise CapabilityError(
            "tools: this model's chat template does not render them, so the model would never see "
            "them"
        )
    known_format = format_of(template or "", format)
    added = tokenizer.added_tokens_decoder
    marks = {
        entry.content: token
        for token, entry in added.items()
        if entry.content in known_format.markers
    }
    written = {token: marker for marker, token in marks.items() if added[token].special}
    parallel = True if parallel_tool_calls is None else parallel_tool_calls
    choice = _choice(tool_choice, [_name(tool) for tool in tools])
    if known_format.is_harmony and (
        choice not in ("none", "auto") or any(tool["function"].get("strict") for tool in tools)
    ):
        raise CapabilityError(
            "tool_choice and strict tools cannot be enforced in gpt-oss's format: use 'auto', "
            "without 'strict'"
        )
    return ToolUse(tuple(tools), choice, parallel, known_format, marks, written)


def merged_calls(deltas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tool calls of a whole message from the deltas that a stream would have sent; empty where
    there are none."""
    calls: dict[int, list[Mapping[str, Any]]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls", []):
            calls.setdefault(part["index"], []).append(part)
    found: list[dict[str, Any]] = []
    for _, parts in sorted(calls.items()):
        arguments = "".join(part["function"]["arguments"] for part in parts)
        function = {"name": parts[0]["function"]["name"], "arguments": arguments}
        found.append({"id": parts[0]["id"], "type": "function", "function": function})
    return found


def _choice(wanted: str | Mapping[str, Any] | None, names: list[str]) -> str:
    if wanted is None:
        return "auto"
    if isinstance(wanted, str):
        if wanted not in ("none", "auto", "required"):
            raise RequestError(
                f"tool_choice must be none, auto, required or a function, got '{wanted}'"
            )
        return wanted
    name = str((wanted.get("function") or {}).get("name"))
    if name not in names:
        raise RequestError(
            f"tool_choice names '{name}', which is none of the tools.{did_you_mean(name, names)}"
        )
    return "=" + name


def _check(tools: Sequence[Mapping[str, Any]]) -> None:
    names = [_name(tool) for tool in tools]
    for index, name in enumerate(names):
        if not NAME.fullmatch(name):
            raise RequestError(
                f"tools.{index}.function.name must be 1 to 64 of A-Z, a-z, 0-9, _, - and ., got "
                f"'{name}'"
            )
        if name in names[:index]:
            raise RequestError(f"tools.{index}.function.name: two tools are called '{name}'")
        _check_parameters(
            f"tools.{index}.function.parameters", tools[index]["function"].get("parameters") or {}
        )


def _check_parameters(where: str, schema: Mapping[str, Any]) -> None:
    """Checks as much as reading calls takes for granted; the rest is the grammar's."""
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, Mapping | None):
        raise RequestError(
            f"{where}.properties must be an object with a schema for each name, got "
            f"{json.dumps(properties)[:80]}"
        )
    for name, part in (properties or {}).items():
        if not isinstance(part, Mapping | bool):
            raise RequestError(
                f"{where}.properties.{name} must be a schema, got {json.dumps(part)[:80]}"
            )
    if required is not None and not (
        isinstance(required, list) and all(isinstance(name, str) for name in required)
    ):
        raise RequestError(
            f"{where}.required must be a list of names, got {json.dumps(required)[:80]}"
        )


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])
