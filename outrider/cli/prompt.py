"""Reads the prompt from the argument, a file, or standard input. Exactly one of them."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.errors import ConfigError, RequestError
from outrider.wellformed import checked_text


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt. ConfigError when there is none, two, or no text in it; RequestError when it is empty."""
    if argument is not None and file is not None:
        raise ConfigError("two prompts: give either the PROMPT argument or --prompt-file, not both.")
    text = argument if argument is not None else _read(file)
    if not text:
        raise RequestError("the prompt is empty: there is nothing to continue.")
    return checked_text("the prompt", text)


def _read(file: Path | None) -> str:
    """Text of a file or of standard input, without the newline that `echo` puts at its end."""
    if file is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give it as an argument, with --prompt-file, or through standard input.")
    name = "standard input" if file is None or str(file) == "-" else f"prompt file '{file}'"
    try:
        data = sys.stdin.buffer.read() if name == "standard input" else Path(file or "").read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start}).") from error
    return text.removesuffix("\n").removesuffix("\r")
