"""Anthropic's bodies as bodies of chat completions: the same request to the engine, whichever
interface it came by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.serve.schema.anthropic import (
    AnthropicToolChoice,
    ClientTool,
    ContentBlock,
    CountBody,
    MessagesBody,
    TextBlock,
    Turn,
)
from outrider.serve.schema.base import made
from outrider.serve.schema.chat import ChatBody
from outrider.wellformed import is_text

THOUGHT = "messages[].content[].thinking"  # the path of thoughts in these bodies
NAMES = {  # of fields of chat completions, in errors -> in these bodies
    "reasoning_effort": "output_config.effort", r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format", "thinking_token_budget": "thinking.budget_tokens",
    "stop(?= must)": "stop_sequences", r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
}  # fmt: skip
SAMPLING = ("temperature", "top_p", "top_k", "seed", "priority", "stream")


def chat_of(body: CountBody) -> ChatBody:
    """The body of a chat completion that a body of /v1/messages means.

    Raises RequestError where the two together make no request.
    """
    messages = [*_system(body), *(message for turn in body.messages for message in _messages(turn))]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in body.tools or []] or None,
        "chat_template_kwargs": body.chat_template_kwargs,
        **_choice(body.tool_choice),
        **_config(body),
        "continue_final_message": True if messages[-1]["role"] == "assistant" else None,
    }
    if body.thinking is not None:
        fields["thinking"] = {
            "type": body.thinking.type,
            "budget_tokens": body.thinking.budget_tokens,
        }
        fields["include_reasoning"] = False if body.thinking.display == "omitted" else None
    if isinstance(body, MessagesBody):
        fields |= {name: getattr(body, name) for name in SAMPLING}
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "user": None if body.metadata is None else body.metadata.user_id,
            "speculation": None
            if body.speculation is None
            else body.speculation.model_dump(exclude_none=True),
        }
    return made(ChatBody, fields)


def place_of(call: Mapping[str, Any], body: CountBody) -> str:
    """How a client knows the message of a call, for errors."""
    blocks = [
        (number, block) for number, turn in enumerate(body.messages) for block in _blocks(turn)
    ]
    number = next(
        number for number, block in blocks if block.type == "tool_use" and block.id == call["id"]
    )
    return f"message {number}"


def _blocks(turn: Turn) -> Sequence[ContentBlock]:
    return () if isinstance(turn.content, str) else turn.content


def _system(body: CountBody) -> list[dict[str, Any]]:
    if body.system is None:
        return []
    return [
        {
            "role": "system",
            "content": body.system if isinstance(body.system, str) else _text(body.system),
        }
    ]


def _messages(turn: Turn) -> Iterator[dict[str, Any]]:
    """The messages of one turn: results of tools, and the user's text alongside them."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif turn.role == "assistant":
        yield _answer(turn.content)
    else:
        texts: list[ContentBlock] = []
        for block in turn.content:
            if block.type == "tool_result":
                if texts:
                    yield {"role": turn.role, "content": _text(texts)}
                    texts = []
                content = (
                    block.content if isinstance(block.content, str) else _text(block.content or [])
                )
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            else:
                texts.append(block)
        if texts:
            yield {"role": turn.role, "content": _text(texts)}


def _answer(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": _json(block.input)},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    thoughts = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    content = _text([block for block in blocks if block.type == "text"])
    return {
        "role": "assistant",
        "content": content,
        **({"reasoning": thoughts} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _json(value: Any) -> str:
    """A value as models write it, in escapes only where it holds half a character."""
    text = json.dumps(value or {}, ensure_ascii=False)
    return text if is_text(text) else json.dumps(value)


def _text(blocks: Sequence[ContentBlock | TextBlock]) -> str:
    """Texts of several blocks stand on lines of their own, as in vLLM."""
    return "\n".join(block.text or "" for block in blocks if block.type == "text")


def _tool(tool: ClientTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _choice(choice: AnthropicToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    names = {"auto": "auto", "any": "required", "none": "none"}
    wanted = names.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": wanted,
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _config(body: CountBody) -> dict[str, Any]:
    config = body.output_config
    if config is None:
        return {}
    form = None
    if config.format is not None:
        form = {"type": "json_schema", "json_schema": {"schema": config.format.json_schema}}
    return {"reasoning_effort": config.effort, "response_format": form}
