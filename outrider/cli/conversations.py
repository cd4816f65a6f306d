"""Saved conversations: one JSON file for each, in the state folder, which only its owner reads.

{"outrider_chat": 1, "target": "demo", "messages": [{"role": "user", "content": "Hi"}, ...]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.cache import refuse_unsafe, state_folder, write_private
from outrider.errors import ConfigError, did_you_mean
from outrider.wellformed import checked_text, read_json

FORMAT = 1
NAME = re.compile(r"\w[\w.-]{0,99}")
ROLES = ("system", "user", "assistant")
Messages = list[dict[str, str]]


def save(name: str, target: str, messages: Sequence[dict[str, str]]) -> Path:
    """Write a conversation, over one of the same name; its file. Raises ConfigError where it
    cannot."""
    path = _path(name)
    content = {"outrider_chat": FORMAT, "target": target, "messages": messages}
    try:
        write_private(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def load(name: str) -> Messages:
    """The messages of a saved conversation. Raises ConfigError that says what is wrong with its
    file."""
    path = _path(name)
    if name not in names():
        raise ConfigError(f"no saved conversation '{name}'.{did_you_mean(name, names())}")
    try:
        refuse_unsafe(path)
    except OSError as error:
        raise ConfigError(f"{path} is not read: {error}") from error
    content = read_json(path, str(path))
    if not isinstance(content, dict) or content.get("outrider_chat") != FORMAT:
        raise ConfigError(
            f'{path} is no conversation that /save wrote: it must have "outrider_chat": {FORMAT}'
        )
    messages = content.get("messages")
    if not isinstance(messages, list):
        raise ConfigError(f"{path}: 'messages' must be a list, got {type(messages).__name__}")
    return [_checked(message, f"{path}: message {n}") for n, message in enumerate(messages)]


def names() -> list[str]:
    """The saved ones."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def _checked(message: Any, called: str) -> dict[str, str]:
    if (
        not isinstance(message, dict)
        or message.keys() != {"role", "content"}
        or message["role"] not in ROLES
        or not isinstance(message["content"], str)
    ):
        raise ConfigError(
            f"{called} must have a role ({', '.join(ROLES)}) and a text as content, got "
            f"{message!r:.80}"
        )
    checked_text(called, message["content"])
    return message


def _path(name: str) -> Path:
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"a conversation's name has letters, digits, '.', '_' and '-', got '{name}'"
        )
    return _folder() / f"{name}.json"


def _folder() -> Path:
    return state_folder() / "chats"
