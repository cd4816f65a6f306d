"""Numbers with units, as data sheets write them: 8B parameters, 900GB/s, 300TFLOPS."""

from __future__ import annotations

import math
import re
from typing import Any

from outrider.errors import ConfigError

_NUMBER = re.compile(r"\s*(?P<number>[\d.]+(?:e[+-]?\d+)?)\s*(?P<unit>.*?)\s*", re.IGNORECASE | re.DOTALL)
MIN_PARAMETERS = 1000
PARAMETERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
BANDWIDTH = {"mb/s": 1e6, "gb/s": 1e9, "tb/s": 1e12, "mib/s": 2.0**20, "gib/s": 2.0**30, "tib/s": 2.0**40}
MEMORY = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10,
    "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
FLOPS = {
    f"{prefix}flop{end}": factor for prefix, factor in (("g", 1e9), ("t", 1e12), ("p", 1e15)) for end in ("s", "/s")
}


def parameters(option: str, text: str) -> int:
    """'8B' -> 8000000000; 0 is allowed, but no handful, which lacks its unit. Raises ConfigError."""
    form = "a number of parameters like 8B, 0.5B, 135M"
    count = round(_quantity(option, text, PARAMETERS, form))
    if 0 < count < MIN_PARAMETERS:
        raise ConfigError(f"{option} takes {form}; '{text}' are {count} parameters")
    return count


def memory(option: str, text: str, *, or_none: bool = False) -> int:
    """'4GiB' -> bytes; `or_none`: 0 is allowed. Raises ConfigError."""
    value = _quantity(option, text, MEMORY, "bytes like 4GiB, 500MiB, 2GB")
    return round(value if or_none and value == 0 else _positive(option, text, value))


def bandwidth(option: str, text: str) -> float:
    """'900GB/s' -> bytes/s. Raises ConfigError."""
    return _positive(
        option, text, _quantity(option, text, BANDWIDTH, "bytes per second like 900GB/s, 3.35TB/s, 40GiB/s")
    )


def flops(option: str, text: str) -> float:
    """'300TFLOPS' -> operations/s. Raises ConfigError."""
    return _positive(
        option, text, _quantity(option, text, FLOPS, "operations per second like 300TFLOPS, 1.2PFLOPS, 800GFLOPS")
    )


def probabilities(option: str, text: str) -> list[float]:
    """'0.9,0.85' -> [0.9, 0.85]; the range is checked where they are used. Raises ConfigError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} takes probabilities with commas between, like 0.9,0.85,0.8; got '{text}'"
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
