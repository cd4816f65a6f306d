"""Tool calls as the templates of every known kind of model write them; and what a client reads out
of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from outrider.serve.tools.formats import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    SEP,
    ToolFormat,
    format_of,
)
from outrider.serve.tools.reader import ToolReader
from outrider.serve.tools.use import merged_calls

Call = tuple[str, dict[str, Any]]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {}}
LIST = "{% for t in tools %}{{ t }}{% endfor %}"
TEMPLATES = {
    "hermes": LIST + "<tool_call>",
    "qwen3-coder": LIST
    + "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "glm": LIST + "<tool_call>{function-name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>",
    "glm-tight": LIST
    + "<tool_call>{function-name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value>",
    "deepseek": LIST + f"{CALLS}{CALL}tool_call_name{SEP}tool_call_arguments{CALL_END}",
    "deepseek-fenced": LIST + f"{CALLS}{CALL}function{SEP}tool_call_name\\n```json",
    "mistral": LIST + "[TOOL_CALLS]",
    "mistral-args": LIST + "[TOOL_CALLS]name[ARGS]",
    "llama3": LIST + "<|python_tag|>",
    "pythonic": LIST + "[func_name1(params_name1=params_value1)]",
}
FORMATS: dict[str, ToolFormat] = {name: format_of(template) for name, template in TEMPLATES.items()}
BARE = ("llama3", "pythonic")  # calls in place of an answer
CLOSED = tuple(name for name, form in FORMATS.items() if form.closing)  # text may follow


def written(name: str, calls: Sequence[Call]) -> str:
    """The text of a model of this kind."""
    return WRITERS[name](calls)


def read(
    form: ToolFormat,
    pieces: Sequence[str],
    *,
    parallel: bool = True,
    schemas: dict[str, Any] = SCHEMAS,
) -> tuple[str, list[tuple[str, str]], str | None]:
    """(content, calls with their arguments as text, finish reason) as a client puts them together."""
    reader = ToolReader(form, schemas, parallel=parallel)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.end()
    for delta in deltas:
        json.dumps(delta, ensure_ascii=False, allow_nan=False).encode()  # can be sent
        assert delta.get("content", "x"), "an empty delta"
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in merged_calls(deltas)
    ]
    return "".join(delta.get("content", "") for delta in deltas), calls, reader.finish_reason


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json('arguments', *call)}\n</tool_call>" for call in calls)


def _qwen(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(
            f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(gap: str) -> Callable[[Sequence[Call]], str]:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(
            f"<arg_key>{key}</arg_key>{gap}<arg_value>{_bare(value)}</arg_value>{gap}"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{gap}{given}</tool_call>"

    return lambda calls: gap.join(one(*call) for call in calls)


def _deepseek(calls: Sequence[Call]) -> str:
    return f"{CALLS}{''.join(f'{CALL}{name}{SEP}{_dumped(given)}{CALL_END}' for name, given in calls)}{CALLS_END}"


def _fenced(calls: Sequence[Call]) -> str:
    blocks = "\n".join(
        f"{CALL}function{SEP}{name}\n```json\n{_dumped(given)}\n```{CALL_END}"
        for name, given in calls
    )
    return f"{CALLS}{blocks}{CALLS_END}"


def _mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS][{', '.join(_json('arguments', *call) for call in calls)}]"


def _mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dumped(given)}" for name, given in calls)


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(_json("parameters", *call) for call in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    items = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    )
    return f"[{', '.join(items)}]"


def _json(key: str, name: str, arguments: dict[str, Any]) -> str:
    return _dumped({"name": name, key: arguments})


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _dumped(value)


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": _hermes, "qwen3-coder": _qwen, "glm": _glm("\n"), "glm-tight": _glm(""), "deepseek": _deepseek,
    "deepseek-fenced": _fenced, "mistral": _mistral, "mistral-args": _mistral_args, "llama3": _llama3, "pythonic": _pythonic,
}  # fmt: skip
