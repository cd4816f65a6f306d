"""Values from the command line, checked before anything is done: numbers with units as data sheets
write them, prompts, files to be written."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, RequestError
from outrider.wellformed import checked_text

_NUMBER = re.compile(
    r"\s*(?P<number>[\d.]+(?:e[+-]?\d+)?)\s*(?P<unit>.*?)\s*", re.IGNORECASE | re.DOTALL
)
MEMORY = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10,
    "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip


def memory(option: str, text: str, *, or_none: bool = False) -> int:
    """'4GiB' -> bytes; `or_none`: 0 is allowed. Raises ConfigError."""
    value = _quantity(option, text, MEMORY, "bytes like 4GiB, 500MiB, 2GB")
    return round(value if or_none and value == 0 else _positive(option, text, value))


def probabilities(option: str, text: str) -> list[float]:
    """'0.9,0.85' -> [0.9, 0.85]; the range is checked where they are used. Raises ConfigError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} takes probabilities with commas between, like 0.9,0.85,0.8; got '{text}'"
        ) from None


def by_count(option: str, text: str) -> dict[int, float]:
    """'5:1.05,9:1.4' -> {5: 1.05, 9: 1.4}. Raises ConfigError."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(count): float(number) for count, number in pairs}
    except ValueError:
        raise ConfigError(
            f"{option} takes N:NUMBER pairs with commas between, like 5:1.05,9:1.4; got '{text}'"
        ) from None


def numbers(option: str, text: str, kind: type) -> list[Any]:
    """The numbers of a comma-separated list, without duplicates. Raises ConfigError."""
    try:
        return list(dict.fromkeys(kind(word) for word in text.split(",") if text))
    except ValueError as error:
        wanted = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option} takes {wanted} with commas between, got '{text}'") from error


def _quantity(option: str, text: str, units: dict[str, float], form: str) -> float:
    match = _NUMBER.fullmatch(text)
    try:
        value = float(match["number"]) * units[match["unit"].lower()] if match else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{option} takes {form}; got '{text}'")
    return value


def _positive(option: str, text: str, value: float) -> float:
    if value <= 0:
        raise ConfigError(f"{option} must be above 0; got '{text}'")
    return value


def read_prompt(argument: str | None) -> str:
    """The prompt; none or - is standard input. ConfigError where nothing can be read, RequestError
    for an empty one."""
    text = _read() if argument is None or argument == "-" else argument
    if not text:
        raise RequestError("the prompt is empty: there is nothing to continue.")
    return checked_text("the prompt", text)


def _read() -> str:
    """Text of standard input, without the newline that `echo` puts at its end."""
    if sys.stdin.isatty():
        raise ConfigError(
            "no prompt: give it as an argument or through standard input (outrider ... < FILE)."
        )
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read standard input: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text (byte {error.start}).") from error
    return text.removesuffix("\n").removesuffix("\r")


def check_file(path: Path) -> None:
    """Raises ConfigError where no file can be written: a folder of that name, no folder for it, no
    permission."""
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; name a file in it")
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise ConfigError(f"the folder of {path} does not exist; create it first")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: no permission")


def check_folder(path: Path) -> None:
    """Raises ConfigError where no folder can be made or filled: a file of that name or above it, no
    permission."""
    # "/" is always there
    nearest = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not os.path.isdir(nearest):
        raise ConfigError(f"{nearest} is a file; a folder is needed there. Give another --out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: no permission in {nearest}")
