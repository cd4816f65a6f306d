"""Whether what comes from outside is well formed: text, and files of JSON.

Python, and escapes in JSON, can make halves of surrogate pairs, which no tokenizer or client takes. Bytes that are no UTF-8
become such halves, too, when they come from the command line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, RequestError

MAX_NESTED = 200  # as many brackets as Python's own syntax has; what its JSON reads varies from version to version
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def is_text(text: str) -> bool:
    """Whether it can be encoded, and so sent, written and tokenized."""
    return text.isascii() or _first_half(text) is None


def checked_text(called: str, text: str) -> str:
    """The text itself, if it is well formed. Raises RequestError where it is none; `called`: what the message calls it."""
    if not text.isascii() and (position := _first_half(text)) is not None:
        raise RequestError(f"{called} is not UTF-8 text: letter {position + 1} is half of a surrogate pair")
    return text


def parsed_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError where it is none, or nested deeper than MAX_NESTED."""
    if text.count("[") + text.count("{") > MAX_NESTED:
        depth = 0
        for found in _BRACKETS.finditer(text):
            depth += (found[0] in "[{") - (found[0] in "]}")
            if depth > MAX_NESTED:
                raise ValueError(f"nested more than {MAX_NESTED} levels deep")
    return json.loads(text)


def read_json(path: Path, called: str, form: str = "") -> Any:
    """The content of a JSON file. Raises ConfigError that says what is wrong with it; `called`: what the message calls it,
    `form`: what it should look like."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{called} is not JSON: {error}{form}") from error


def read_text(path: Path, called: str) -> str:
    """A file's text, line ends as they are. Raises ConfigError where it cannot be read; `called`: what the message calls it."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{called} is not UTF-8 text (byte {error.start})") from error


def _first_half(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
