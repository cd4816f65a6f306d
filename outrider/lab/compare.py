"""Two results of one kind, old and new: which numbers changed, by how much, and whether noise can
explain it.

Intervals are combined as those of independent runs by MOVER (Zou & Donner 2008, Statistics in
Medicine 27): with limits (l1, u1) and (l2, u2) of x1 and x2,

    x2 - x1 lies between  x2 - x1 - sqrt((x2 - l2)^2 + (u1 - x1)^2)  and  x2 - x1 + sqrt((u2 - x2)^2 + (x1 - l1)^2)

and a ratio is the same of logarithms. A number is better or worse where this interval leaves out
"no change". What shifts a whole run (a warm machine) is not in the interval; runs on different
machines say so before anything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import ConfigError
from outrider.extras import check_lab
from outrider.lab.result import Comparable, Interval, Result, Scale, comparables

Verdict = Literal["better", "worse", "higher", "lower", "same", "no evidence"]
SAME_MEMORY = 0.02  # share by which the memory of one machine differs between kernels


@dataclass(frozen=True)
class Difference:
    """A fact that both runs record, with different values."""

    what: str
    old: str
    new: str


@dataclass(frozen=True)
class Change:
    """One number of both results. `change`: new / old, or new - old, with its interval; ends that
    meet are exact."""

    label: str
    unit: str
    old: float | Interval
    new: float | Interval
    scale: Scale
    change: Interval
    higher_is_better: bool | None
    verdict: Verdict

    @property
    def is_measured(self) -> bool:
        """Whether chance has a part in it."""
        return isinstance(self.old, Interval) or isinstance(self.new, Interval)


@dataclass(frozen=True)
class Comparison:
    """Two results of one kind side by side."""

    old: Result
    new: Result
    machines: tuple[Difference, ...]
    others: tuple[Difference, ...]  # versions, settings, the command
    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]


def compare(old: Result, new: Result) -> Comparison:
    """Two results side by side. Raises ConfigError for results of two kinds, or without a number in
    common."""
    check_lab("comparing results")
    if old.kind != new.kind:
        raise ConfigError(
            f"a result of '{old.kind}' cannot be compared with one of '{new.kind}': both must be "
            "of one kind"
        )
    before = comparables(old)
    after = comparables(new)
    if not before or not after:
        raise ConfigError(
            f"a result of '{old.kind}' holds no number to compare; each of them can be rendered "
            "alone"
        )
    shared = [label for label in before if label in after]
    if not shared:
        raise ConfigError(
            f"the two results have no number in common: the old one has '{next(iter(before))}', "
            f"the new one '{next(iter(after))}'; compare runs of the same tasks and configurations"
        )
    return Comparison(
        old=old,
        new=new,
        machines=tuple(
            difference
            for difference in _differences(old.machine, new.machine)
            if not _is_same_memory(difference)
        ),
        others=(*_differences(old.versions, new.versions), *_differences(_asked(old), _asked(new))),
        changes=tuple(_change(before[label], after[label]) for label in shared),
        only_old=tuple(label for label in before if label not in after),
        only_new=tuple(label for label in after if label not in before),
    )


def ratio(old: float | Interval, new: float | Interval) -> Interval:
    """new / old of positive numbers; a limit at or below 0 leaves its side open."""
    logs = [
        tuple(math.log(number) if number > 0 else -math.inf for number in _limits(result))
        for result in (old, new)
    ]
    limits = [math.exp(number) if number < 700 else math.inf for number in _mover(*logs)]
    return Interval(value=limits[0], low=limits[1], high=limits[2], level=_level(old, new))


def difference(old: float | Interval, new: float | Interval) -> Interval:
    """new - old."""
    value, low, high = _mover(_limits(old), _limits(new))
    return Interval(value=value, low=low, high=high, level=_level(old, new))


def _limits(number: float | Interval) -> tuple[float, ...]:
    return (
        (number.value, number.low, number.high)
        if isinstance(number, Interval)
        else (number, number, number)
    )


def _mover(old: tuple[float, ...], new: tuple[float, ...]) -> tuple[float, float, float]:
    value = new[0] - old[0]
    return (
        value,
        value - math.hypot(new[0] - new[1], old[2] - old[0]),
        value + math.hypot(new[2] - new[0], old[0] - old[1]),
    )


def _level(old: float | Interval, new: float | Interval) -> float:
    """The lower level of both: the ends of a wider interval hold at it, too."""
    return min(
        (result.level for result in (old, new) if isinstance(result, Interval)), default=0.95
    )


def _change(old: Comparable, new: Comparable) -> Change:
    is_ratio = (
        old.scale == new.scale == "ratio" and min(_limits(old.value)[0], _limits(new.value)[0]) > 0
    )
    change = (ratio if is_ratio else difference)(old.value, new.value)
    no_change = 1.0 if is_ratio else 0.0
    verdict: Verdict = "no evidence"
    if old.value == new.value and change.low == change.high:
        verdict = "same"
    elif not change.low <= no_change <= change.high:
        has_grown = change.low > no_change
        verdict = "higher" if has_grown else "lower"
        if new.higher_is_better is not None:
            verdict = "better" if has_grown == new.higher_is_better else "worse"
    return Change(
        label=new.label,
        unit=new.unit,
        old=old.value,
        new=new.value,
        scale="ratio" if is_ratio else "difference",
        change=change,
        higher_is_better=new.higher_is_better,
        verdict=verdict,
    )


def _asked(result: Result) -> dict[str, Any]:
    """The settings and the command of a result."""
    return {**getattr(result, "settings", {}), "command": result.command or None}


def _is_same_memory(difference: Difference) -> bool:
    is_memory = (
        difference.what == "memory_bytes" and difference.old.isdigit() and difference.new.isdigit()
    )
    return is_memory and abs(int(difference.old) / max(int(difference.new), 1) - 1) < SAME_MEMORY


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for name in {**old, **new}:
        before = old.get(name)
        after = new.get(name)
        if before != after:
            yield Difference(name, _word(before), _word(after))


def _word(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_word(item)}" for name, item in value.items())
    return ", ".join(map(_word, value)) or "none" if isinstance(value, list | tuple) else str(value)
