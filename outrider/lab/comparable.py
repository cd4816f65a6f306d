"""The numbers of a result that mean the same in another result of its kind, so that two can be laid side by side.

A result says which they are by its method `comparable`:

    def comparable(self) -> list[Comparable]:
        return [Comparable(f"{cell.task}: {name}", cell.speedup, higher_is_better=True, unit="x") for ...]

The label is what is compared: equal labels are the same number, so it holds everything that tells cells apart (task, batch
size, configuration by its text form, never by its index in a list). An `Interval` is a measurement. A plain float is exact: it
would come out the same again (a count, a size), and any difference is one. A measurement that has no interval is
`Interval.unknown(value)`: its spread is not known. A ratio of sums over prompts should state its `parts` too: over the same
prompts a change is then found prompt by prompt (outrider/lab/compare.py), which tells far smaller ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from outrider.lab.result import Interval, Result

Parts = Mapping[str, tuple[float, float]]  # prompt -> what stands above and below the line
Scale = Literal["ratio", "difference"]


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


def comparables(result: Result) -> dict[str, Comparable]:
    """By label, in the result's order; none of a result that has no such method. Raises ValueError for one label twice."""
    found: list[Comparable] = getattr(result, "comparable", list)()
    by_label = {one.label: one for one in found}
    if len(by_label) < len(found):
        labels = [one.label for one in found]
        raise ValueError(f"a {result.kind} result has two numbers called '{next(x for x in labels if labels.count(x) > 1)}'")
    return by_label
