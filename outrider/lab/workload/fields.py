"""Fields of an entry, checked: text, numbers, conversations. A wrong one raises `UnusableError`."""

from __future__ import annotations

from typing import Any, Literal

Fields = dict[str, Any]
Message = dict[str, str]
Turns = Literal["first", "all"]  # of a recorded conversation: its first question, or each with the turns before it
TAUGHT_ROLES = ("assistant", "system", "developer")  # a conversation that ends with one of these asks nothing


class UnusableError(Exception):
    """An entry that is no request; the message says why."""


def prompt_text(entry: Fields, name: str) -> str:
    """A field that is asked of the model: text, and not blank."""
    value = entry.get(name)
    if not isinstance(value, str):
        raise UnusableError(f"'{name}' must be text, got {_shown(value)}")
    if not value.strip():
        raise UnusableError(f"'{name}' is empty")
    return value


def optional_text(entry: Fields, *names: str) -> str | None:
    """The first of these fields that is there, as text. Numbers become text: ids and answers are often written as numbers."""
    for name in names:
        value = entry.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if value is not None:
            raise UnusableError(f"'{name}' must be text, got {_shown(value)}")
    return None


def optional_count(entry: Fields, *names: str) -> int | None:
    """The first of these fields that is there, as a number of at least 1; 16.0 is 16, as on the server."""
    for name in names:
        value = entry.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnusableError(f"'{name}' must be a whole number of at least 1, got {_shown(value)}")
        return value
    return None


def identity(entry: Fields, *names: str) -> str:
    """The entry's own id, or "" where it has none."""
    return optional_text(entry, *names) or ""


def conversation(value: Any) -> tuple[tuple[Message, ...], str | None]:
    """Messages up to the last question, and the recorded answer where the conversation goes on with one."""
    if not isinstance(value, list) or not value:
        raise UnusableError(f"'messages' must be a list of messages, got {_shown(value)}")
    messages = [_message(number, message) for number, message in enumerate(value, 1)]
    answer = messages.pop()["content"] if len(messages) > 1 and messages[-1]["role"] == "assistant" else None
    last = messages[-1]
    if last["role"] in TAUGHT_ROLES:
        raise UnusableError(f"the conversation ends with the role '{last['role']}'; the last word must be the user's")
    if not last["content"].strip():
        raise UnusableError(f"the last message, of the role '{last['role']}', is empty")
    return tuple(messages), answer


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise UnusableError(f"message {number} must be an object with 'role' and 'content', got {_shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UnusableError(f"message {number} has no role")
    return {"role": role, "content": content_text(message.get("content"), f"message {number} ({role[:20]})")}


def content_text(content: Any, what: str) -> str:
    """The text of a message's content: a string, or OpenAI's list of parts as long as all of them are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise UnusableError(f"{what} has no text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise UnusableError(f"{what} has a part that is no text ({_shown(kind)}); only text can be asked here")
        texts.append(part["text"])
    return "".join(texts)


def _shown(value: Any) -> str:
    """A value in a few words, for a message."""
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "object"
        return f"an empty {kind}" if not value else {"list": "a list", "object": "an object"}[kind]
    return "nothing" if value is None else repr(value)[:40]
