"""The numbers of a result that mean the same in another result of its kind, so that two can be laid side by side.

A result says which they are by a method; that is the whole protocol:

    def comparable(self) -> list[Comparable]:
        return [Comparable(f"{cell.task}: {name}", cell.speedup, higher_is_better=True, unit="x") for ...]

The label is what is compared: equal labels are the same number, so it holds everything that tells cells apart (task, batch
size, configuration by its text form, never by its place in a list). An `Interval` is a measurement. A plain float is exact: it
would come out the same again (a count, a size), and any difference is one. A measurement that has no interval is
`Interval(value=..., low=0, high=math.inf)`, about which nothing can be said. A ratio of sums over prompts should say its `parts`
too: over the same prompts a change is then found prompt by prompt (outrider/lab/pairing.py), which tells far smaller ones.

Without the method every `Interval` in a result is compared, under the path of field names to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel

from outrider.lab.pairing import Parts
from outrider.lab.result import Interval, Result

Scale = Literal["ratio", "difference"]
IDENTITY = ("label", "name", "id", "configuration", "family", "task", "temperature", "batch_size", "context", "num_draft_tokens")
HIGHER = ("speedup", "tau", "alpha", "tokens_per_s", "throughput", "goodput", "accuracy", "utilisation", "gain")
LOWER = ("_s", "_bytes", "seconds", "ttft", "tpot", "latency", "regret")
_BRACKETS = re.compile(r"\[[^\]]*\]")  # what names an item of a list


@dataclass(frozen=True)
class Comparable:
    """One number. `higher_is_better`: None for numbers that are neither good nor bad. `scale`: "difference" for numbers that may
    be 0 or negative (differences, accuracies near 0). `parts`: by prompt (its id), of a value = sum above / sum below."""

    label: str
    value: float | Interval
    higher_is_better: bool | None = None
    unit: str = ""
    scale: Scale = "ratio"
    parts: Parts | None = None


@runtime_checkable
class HasComparables(Protocol):
    """A result that chooses for itself."""

    def comparable(self) -> list[Comparable]: ...


def comparables(result: Result) -> dict[str, Comparable]:
    """By label, in the result's order. Raises ValueError where a result gives two numbers one label."""
    found = result.comparable() if isinstance(result, HasComparables) else list(_intervals(result, ""))
    by_label = {one.label: one for one in found}
    if len(by_label) < len(found):
        labels = [one.label for one in found]
        raise ValueError(f"a {result.kind} result has two numbers called '{next(x for x in labels if labels.count(x) > 1)}'")
    return by_label


def _intervals(value: Any, path: str) -> Iterator[Comparable]:
    if isinstance(value, Interval):
        yield Comparable(path, value, _direction(path), scale="ratio" if value.value > 0 else "difference")
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _intervals(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _intervals(item, f"{path}[{key}]")
    elif isinstance(value, list | tuple):
        for item, name in zip(value, _names(value), strict=True):
            yield from _intervals(item, f"{path}[{name}]")


def _names(items: list[Any] | tuple[Any, ...]) -> list[str]:
    """What tells items apart: the fields that identify, or else the places."""
    names = [", ".join(str(getattr(item, field)) for field in IDENTITY if _identifies(item, field)) for item in items]
    return names if len(set(names)) == len(names) and all(names) else [str(place) for place in range(len(items))]


def _identifies(item: Any, field: str) -> bool:
    return isinstance(item, BaseModel) and isinstance(getattr(item, field, None), str | int | float)


def _direction(path: str) -> bool | None:
    """From the last names of the path, which carry units by convention (outrider/lab/result.py)."""
    for name in reversed(_BRACKETS.sub("", path).split(".")):
        if any(word in name for word in HIGHER):
            return True
        if any(name.endswith(word) or name.startswith(word) for word in LOWER):
            return False
    return None
