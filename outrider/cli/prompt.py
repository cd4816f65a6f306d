"""Reads the prompt from the argument, or from standard input."""

from __future__ import annotations

import sys

from outrider.errors import ConfigError, RequestError
from outrider.wellformed import checked_text


def read_prompt(argument: str | None) -> str:
    """The prompt; none or - is standard input. ConfigError where nothing can be read, RequestError for an empty one."""
    text = _read() if argument is None or argument == "-" else argument
    if not text:
        raise RequestError("the prompt is empty: there is nothing to continue.")
    return checked_text("the prompt", text)


def _read() -> str:
    """Text of standard input, without the newline that `echo` puts at its end."""
    if sys.stdin.isatty():
        raise ConfigError("no prompt: give it as an argument or through standard input (outrider ... < FILE).")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read standard input: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text (byte {error.start}).") from error
    return text.removesuffix("\n").removesuffix("\r")
