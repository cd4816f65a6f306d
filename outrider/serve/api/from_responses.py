"""Bodies of /v1/responses as bodies of chat completions, with the responses that they continue from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.serve.api.response_store import ResponseStore
from outrider.serve.schema.base import made
from outrider.serve.schema.chat import ChatBody
from outrider.serve.schema.responses import InputItem, InputPart, ResponsesBody

THOUGHT = "input[].content"  # the path of thoughts in these bodies
NAMES = {  # of fields of chat completions, in errors -> in these bodies
    "messages": "input", "reasoning_effort": "reasoning.effort", r"response_format\.json_schema": "text.format",
    "response_format": "text.format", "max_completion_tokens": "max_output_tokens",
    r"tools\.(\d+)\.function": r"tools.\1",
}  # fmt: skip
SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "seed", "priority", "parallel_tool_calls", "chat_template_kwargs",
    "metadata", "user", "prompt_cache_key", "safety_identifier",
)  # fmt: skip
Message = dict[str, Any]


def chat_of(body: ResponsesBody, items: Iterable[InputItem]) -> ChatBody:
    """`items`: the conversation that is answered. Raises RequestError where all that makes no
    request."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields = {
        **{name: getattr(body, name) for name in SAME},
        "messages": [*system, *_messages(map(_fields, items))],
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or []] or None,
        "tool_choice": _choice(body),
        "response_format": _form(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "speculation": None
        if body.speculation is None
        else body.speculation.model_dump(exclude_none=True),
    }
    return made(ChatBody, fields)


def items_of(body: ResponsesBody, store: ResponseStore) -> list[InputItem]:
    """The turns that the body adds to a conversation. Raises ApiError where it refers to an item
    that is not kept."""
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    return [
        InputItem.model_validate(store.find_item(item.id or ""))
        if item.type == "item_reference"
        else item
        for item in body.input
    ]


def place_of(call: Mapping[str, Any], asked: Sequence[InputItem]) -> str:
    """How a client knows the item of a call, for errors. `asked`: the items that its body has."""
    for number, item in enumerate(asked):
        if item.type == "function_call" and item.call_id == call["id"]:
            return f"item {number} of 'input'"
    return "the conversation before 'input'"


def _messages(items: Iterable[Message]) -> list[Message]:
    """Items as messages. Successive thoughts, texts and calls of an assistant are one message."""
    messages: list[Message] = []
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item["type"]:
            case "reasoning":
                messages.append({"role": "assistant", "content": "", "reasoning": item["text"]})
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if last is None:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                else:
                    last["tool_calls"] = [*last.get("tool_calls", []), call]
            case "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": item["text"]}
                )
            case _ if (
                item["role"] == "assistant"
                and last is not None
                and not last["content"]
                and "tool_calls" not in last
            ):
                last["content"] = item["text"]
            case _:
                messages.append({"role": item["role"], "content": item["text"]})
    return messages


def _fields(item: InputItem) -> Message:
    text = item.output if item.type == "function_call_output" else item.content
    if item.type == "reasoning" and not text:
        text = item.summary
    return {
        "type": item.type,
        "role": item.role,
        "text": _text(text),
        "call_id": item.call_id,
        "name": item.name,
        "arguments": item.arguments,
    }


def _text(content: str | list[InputPart] | None) -> str:
    return (
        content if isinstance(content, str) else "".join(part.plain_text for part in content or ())
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.pop("type"), "function": tool}


def _choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    return (
        choice
        if choice is None or isinstance(choice, str)
        else {"type": "function", "function": {"name": choice.name}}
    )


def _form(body: ResponsesBody) -> dict[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    fields = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": fields}
