"""Whether what comes from outside is well formed: text, and files of JSON and TOML.

Python, and escapes in JSON, can make halves of surrogate pairs, which no tokenizer or client takes.
Bytes that are no UTF-8 become such halves, too, when they come from the command line.

Any file may be a stranger's. All that are JSON or TOML are read here, with limits on their size and
on how deep they are nested.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import ConfigError, RequestError

MAX_BYTES = 256 << 20  # of a file: the largest tokenizers take 40 MiB
MAX_TOML_BYTES = 1 << 20
# of lists and objects in one another: as Python's own syntax; what its JSON reads varies with the
# version
MAX_DEPTH = 200
FLAT = 12  # what is nested less deep is found out faster
_STRING = re.compile(r'"[^"]*"')
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_PAIRS = re.compile(r"\[\]|\{\}")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
# of TOML: a.b.c
LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MAX_DEPTH}}}"""
)
TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} lists and objects"


def is_text(text: str) -> bool:
    """Whether it can be encoded, and so sent, written and tokenized."""
    return text.isascii() or _first_half(text) is None


def checked_text(called: str, text: str) -> str:
    """The text itself, if it is well formed. Raises RequestError where it is none; `called`: what
    the message calls it."""
    if not text.isascii() and (position := _first_half(text)) is not None:
        raise RequestError(
            f"{called} is not UTF-8 text: letter {position + 1} is half of a surrogate pair"
        )
    return text


def read_json(path: Path, called: str, form: str = "") -> Any:
    """The content of a JSON file that a user named. Raises ConfigError that says what is wrong with
    it.

    `called`: what the message calls it, `form`: what it should look like.
    """
    try:
        return parsed_json(_named_text(path, MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{called} is not JSON: {error}{form}") from error


def read_toml(path: Path, called: str) -> dict[str, Any]:
    """The content of a TOML file that a user named. Raises ConfigError as `read_json` does."""
    try:
        text = _named_text(path, MAX_TOML_BYTES)
        if LONG_KEY.search(text):  # for which the parser takes memory as the square of its length
            raise ValueError(TOO_DEEP)
        content = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        problem = TOO_DEEP if isinstance(error, RecursionError) else error
        raise ConfigError(f"{called} is not TOML: {problem}") from error
    if _is_deep(content):
        raise ConfigError(f"{called} is not TOML: {TOO_DEEP}")
    return content


def load_json(path: Path) -> Any:
    """The content of a JSON file in a checkpoint, a result's folder or the cache. Raises OSError,
    and ValueError for what is no JSON, no regular file, too large or nested too deep."""
    return parsed_json(regular_bytes(path).decode("utf-8"))


def load_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object, as config.json does. Raises as `load_json`,
    and where it holds none."""
    content = load_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"it holds no JSON object but a {type(content).__name__}")
    return content


def parsed_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError where it is none, or nested deeper than
    MAX_DEPTH."""
    if text.count("[") + text.count("{") > MAX_DEPTH and not _is_flat(text):
        depth = 0
        for bracket in _BRACKETS.finditer(text):
            depth += (bracket[0] in "[{") - (bracket[0] in "]}")
            if depth > MAX_DEPTH:
                raise ValueError(TOO_DEEP)
    return json.loads(text)


def _is_flat(text: str) -> bool:
    """Whether a JSON text is nested at most FLAT deep. Ten times as fast as counting: tokenizers
    have many short lists."""
    brackets = _NO_BRACKETS.sub("", _STRING.sub("", text.replace("\\\\", "").replace('\\"', "")))
    for _ in range(FLAT):
        brackets = _PAIRS.sub("", brackets)
    return not brackets


def regular_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, and ValueError for a device, a pipe, or more
    bytes than `max_bytes`."""
    # a pipe without a writer would wait for one
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        return _bounded(file, max_bytes)


def read_text(path: Path, called: str) -> str:
    """A file's text, line ends as they are. Raises ConfigError where it cannot be read; `called`:
    what the message calls it."""
    try:
        return _named_text(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{called} is not UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise ConfigError(f"{called} cannot be read: {error}") from error


def _named_text(path: Path, max_bytes: int) -> str:
    """The text of what a user named, which may be a pipe."""
    with path.open("rb") as file:
        return _bounded(file, max_bytes).decode("utf-8")


def _bounded(file: BinaryIO, max_bytes: int) -> bytes:
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes >> 20} MiB")
    return content


def _is_deep(content: Any) -> bool:
    """Whether lists and objects are nested deeper than MAX_DEPTH."""
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [
            part for value in level if isinstance(value, dict | list) for part in _parts(value)
        ]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)


def _parts(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _first_half(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
