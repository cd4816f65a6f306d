"""Conversations: messages as callers give them, checked, and rendered by the model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.errors import ConfigError, RequestError
from outrider.templates import takes_parts
from outrider.wellformed import checked_text, is_text

Message = Mapping[str, Any]
TAKEN = frozenset((  # set by options of their own: in chat_template_kwargs they would be ignored
    "messages", "tools", "tokenize", "return_dict", "conversation", "chat_template", "add_generation_prompt",
    "continue_final_message",
))  # fmt: skip


def read_conversations(given: Any) -> list[list[dict[str, Any]]]:
    """One conversation (a list of messages) or a list of conversations, always as a list of conversations.

    Raises RequestError for what is none.
    """
    items = _listed(given, "messages")
    if items and all(isinstance(item, Mapping) for item in items):
        return [_conversation(items, "conversation 0")]
    return [_conversation(_listed(item, f"conversation {number}"), f"conversation {number}") for number, item in enumerate(items)]


def _listed(given: Any, called: str) -> list[Any]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise RequestError(
            f"{called} must be a list of messages like {{'role': 'user', 'content': '...'}}, got {type(given).__name__}"
        )
    return list(given)


def _conversation(messages: list[Any], called: str) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError(f"{called} has no messages: there is nothing to answer")
    return [_message(message, f"message {number} of {called}") for number, message in enumerate(messages)]


def _message(message: Any, called: str) -> dict[str, Any]:
    """A copy with the content as one text."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{called} must be a dictionary with 'role' and 'content', got {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{called} needs a 'role' like 'user', got {message.get('role')!r}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"{called} needs 'content'")
    return {**message, "content": checked_text(f"the content of {called}", _text(content, called))}


def _text(content: Any, called: str) -> str:
    """The content of a message: a text, or pieces of one."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise RequestError(f"the content of {called} must be text, got {type(content).__name__}")
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"the content of {called} has a part of type {kind!r}; models are given text only here")
    return "".join(part["text"] for part in content)


def as_turn(message: Message, template: str) -> dict[str, Any]:
    """A message as the chat template expects it: in pieces, arguments of calls parsed, OpenAI's newer roles under older names."""
    turn = dict(message)
    if isinstance(turn.get("content"), str) and takes_parts(template):
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    if turn["role"] == "developer" and "developer" not in template:
        turn["role"] = "system"  # OpenAI's newer name for the same
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_with_parsed_arguments(call) for call in turn["tool_calls"]]
    return turn


def _with_parsed_arguments(call: Any) -> Any:
    """Templates write arguments as JSON themselves. Text that is no JSON, or JSON with half a character in it, which no tokenizer
    takes, is left to them as the model wrote it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("arguments"), str)):
        return call
    try:
        arguments = json.loads(function["arguments"].strip() or "{}")
        is_readable = is_text(json.dumps(arguments, ensure_ascii=False))
    except (ValueError, RecursionError):  # nested deeper than any arguments are
        return call
    if not is_readable:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template, all of them where it has several; empty: it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def reads(template: str, name: str) -> bool:
    """Whether the template looks at a variable: one that it never reads would be accepted and ignored."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None  # 'thinking' is not 'enable_thinking'


def render(
    tokenizer: Any, model: str, messages: list[dict[str, Any]], *, chat_template: str | None, add_generation_prompt: bool | None,
    continue_final_message: bool, tools: list[Any] | None, chat_template_kwargs: Mapping[str, Any] | None,
) -> list[int]:  # fmt: skip
    """Token ids of one conversation. `add_generation_prompt` None: unless the final message is continued.

    Raises ConfigError for options that the template cannot honour, RequestError where it refuses the messages.
    """
    template = template_text(tokenizer) if chat_template is None else chat_template
    if not template:
        raise ConfigError(f"'{model}' has no chat template; use generate with a plain prompt")
    if continue_final_message and add_generation_prompt:
        raise ConfigError("continue_final_message and add_generation_prompt contradict each other: leave one of them out")
    variables = dict(chat_template_kwargs or {})
    if taken := sorted(set(variables) & TAKEN):
        raise ConfigError(f"chat_template_kwargs cannot set {', '.join(taken)}: they are arguments of their own")
    for name in [*variables, *(["tools"] if tools else [])]:
        if not reads(template, name):
            raise ConfigError(f"the chat template of '{model}' knows no '{name}': leave it out")
    begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    try:
        encoded = tokenizer.apply_chat_template(
            [as_turn(message, template) for message in messages], tools=tools or None, chat_template=chat_template,
            add_generation_prompt=begins, continue_final_message=continue_final_message, return_dict=True, **variables,
        )  # fmt: skip
    except Exception as error:  # templates are programs that come with the model
        raise RequestError(f"the chat template refused the messages: {error}") from error
    if not encoded["input_ids"]:
        raise RequestError(f"the chat template of '{model}' renders nothing of these messages; give another with chat_template")
    return list(encoded["input_ids"])
