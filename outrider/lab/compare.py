"""Two results of one kind, old and new: which numbers changed, by how much, and whether noise can explain it.

Prompts differ far more than runs do. Two intervals that each allow for other prompts cannot tell a small change; what happened
to each prompt can. So a number that both results give prompt by prompt is compared so: with a_i / b_i the parts of prompt i
(seconds of plain decoding and own seconds, or tokens and seconds), the number is A / B = sum a_i / sum b_i, and the logarithm of
new over old has, to first order (the delta method), the influence

    z_i = (a'_i / A' - b'_i / B') - (a_i / A - b_i / B)

of each prompt, and the variance n / (n - 1) sum z_i^2. Student's t with n - 1 degrees of freedom gives the interval: it says
what would come out over other prompts of the same sort. What shifts a whole run (a warm machine) is in none of its prompts
alone, and not in the interval.

Other intervals are combined as those of independent runs by MOVER, the method of variance estimates recovery (Zou & Donner 2008,
Statistics in Medicine 27): with limits (l1, u1) and (l2, u2) of x1 and x2,

    x2 - x1 lies between  x2 - x1 - sqrt((x2 - l2)^2 + (u1 - x1)^2)  and  x2 - x1 + sqrt((u2 - x2)^2 + (x1 - l1)^2)

and a ratio is the same of logarithms. It keeps asymmetric intervals asymmetric and is the usual one for normal errors.
A number is better or worse where this interval leaves out "no change". Runs on different machines are compared too, and say so
before anything else: then machines differ, not versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from outrider.errors import ConfigError
from outrider.extras import check_lab
from outrider.lab.result import Comparable, Interval, Parts, Result, Scale, comparables
from outrider.lazy import scipy

Verdict = Literal["better", "worse", "higher", "lower", "same", "no evidence"]
ENVELOPE = ("schema_version", "kind", "created", "command", "versions", "machine", "notes")
SAME_MEMORY = 0.02  # share by which the memory of one machine differs between kernels
MAX_DIFFERENCES = 40
MIN_PAIRS = 4  # below, the t distribution is so wide that nothing is ever found


@dataclass(frozen=True)
class Difference:
    """A fact that both runs record, with different values."""

    what: str
    old: str
    new: str


@dataclass(frozen=True)
class Change:
    """One number of both results. `change`: new / old, or new - old, with its interval; ends that meet are exact."""

    label: str
    unit: str
    old: float | Interval
    new: float | Interval
    scale: Scale
    change: Interval
    higher_is_better: bool | None
    verdict: Verdict
    num_pairs: int = 0  # prompts it was compared on one by one; 0: compared as independent

    @property
    def is_measured(self) -> bool:
        """Whether chance has a part in it."""
        return isinstance(self.old, Interval) or isinstance(self.new, Interval)


@dataclass(frozen=True)
class Comparison:
    """Two results of one kind beside each other."""

    old: Result
    new: Result
    machines: tuple[Difference, ...]
    versions: tuple[Difference, ...]
    settings: tuple[Difference, ...]  # what was asked for, and measured on
    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]


def compare(old: Result, new: Result) -> Comparison:
    """Two results side by side. Raises ConfigError for results of two kinds, or without a number in common."""
    check_lab("comparing results")
    if old.kind != new.kind:
        raise ConfigError(f"a result of '{old.kind}' cannot be compared with one of '{new.kind}': both must be of one kind")
    before, after = comparables(old), comparables(new)
    if not before or not after:
        raise ConfigError(f"a result of '{old.kind}' holds no number to compare; each of them can be rendered alone")
    shared = [label for label in before if label in after]
    if not shared:
        raise ConfigError(
            f"the two results have no number in common: the old one has '{next(iter(before))}', the new one "
            f"'{next(iter(after))}'; compare runs of the same tasks and configurations"
        )
    return Comparison(
        old, new, _machines(old.machine, new.machine),
        tuple(_differences(old.versions, new.versions)), tuple(_settings(old, new)),
        tuple(_change(before[label], after[label]) for label in shared),
        tuple(label for label in before if label not in after), tuple(label for label in after if label not in before),
    )  # fmt: skip


def ratio(old: float | Interval, new: float | Interval) -> Interval:
    """new / old of positive numbers; a limit at or below 0 leaves its side open."""
    combined = _mover(_map(_log, _interval(old)), _map(_log, _interval(new)), _level(old, new))
    return _map(_exp, combined)


def difference(old: float | Interval, new: float | Interval) -> Interval:
    """new - old."""
    return _mover(_interval(old), _interval(new), _level(old, new))


def _mover(old: Interval, new: Interval, level: float) -> Interval:
    below = math.hypot(_reach(new, level, up=False), _reach(old, level, up=True))
    above = math.hypot(_reach(new, level, up=True), _reach(old, level, up=False))
    value = new.value - old.value
    return Interval(value=value, low=value - below, high=value + above, level=level)


def _reach(one: Interval, level: float, *, up: bool) -> float:
    """From the value to an end, brought to the common level by the normal law."""
    distance = max(0.0, one.high - one.value if up else one.value - one.low)
    quantile = NormalDist().inv_cdf
    return distance if one.level == level else distance * quantile((1 + level) / 2) / quantile((1 + one.level) / 2)


def _level(old: float | Interval, new: float | Interval) -> float:
    """The higher one: nothing is claimed more surely than asked for."""
    return max((one.level for one in (old, new) if isinstance(one, Interval)), default=0.95)


def _interval(number: float | Interval) -> Interval:
    return number if isinstance(number, Interval) else Interval(value=number, low=number, high=number)


def _map(function: Callable[[float], float], one: Interval) -> Interval:
    return Interval(value=function(one.value), low=function(one.low), high=function(one.high), level=one.level)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _change(old: Comparable, new: Comparable) -> Change:
    positive = min(_interval(old.value).value, _interval(new.value).value) > 0
    scale: Scale = "ratio" if positive and old.scale == new.scale == "ratio" else "difference"
    change, num_pairs = _paired(old, new, scale) or ((ratio if scale == "ratio" else difference)(old.value, new.value), 0)
    verdict = _verdict(change, 1.0 if scale == "ratio" else 0.0, new.higher_is_better, old.value == new.value)
    return Change(new.label, new.unit, old.value, new.value, scale, change, new.higher_is_better, verdict, num_pairs)


def _paired(old: Comparable, new: Comparable, scale: Scale) -> tuple[Interval, int] | None:
    if scale != "ratio" or old.parts is None or new.parts is None:
        return None
    return paired_ratio(old.parts, new.parts, _level(old.value, new.value))


def _verdict(change: Interval, no_change: float, higher_is_better: bool | None, same: bool) -> Verdict:
    if same and change.low == change.high:
        return "same"
    if change.low <= no_change <= change.high:
        return "no evidence"
    grown = change.low > no_change
    if higher_is_better is None:
        return "higher" if grown else "lower"
    return "better" if grown == higher_is_better else "worse"


def _machines(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Difference, ...]:
    def is_same_memory(name: str) -> bool:
        sizes = [machine.get(name) for machine in (old, new)]
        return name == "memory_bytes" and all(sizes) and abs(sizes[0] / sizes[1] - 1) < SAME_MEMORY  # type: ignore[operator]

    return tuple(found for found in _differences(old, new) if not is_same_memory(found.what))


def _settings(old: Result, new: Result) -> Iterator[Difference]:
    """Words, counts and switches outside lists of findings; numbers with a fraction only among settings and options."""
    sides = []
    for result in (old, new):
        fields = result.model_dump(exclude=set(ENVELOPE))
        sides.append(dict(_leaves(fields, "")))
    yield from islice(_differences(*sides), MAX_DIFFERENCES)
    if old.command != new.command:
        yield Difference("command", old.command or "unknown", new.command or "unknown")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
        return
    parts = value if isinstance(value, list) else [value]
    chosen = "settings" in path or "options" in path  # by a person: else what has a fraction was measured
    if not any(isinstance(part, dict | list) or (isinstance(part, float) and not chosen) for part in parts):
        yield path, value


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if before != after:
            yield Difference(name, _word(before), _word(after))


def _word(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_word(item)}" for name, item in value.items())
    return ", ".join(map(_word, value)) or "none" if isinstance(value, list | tuple) else str(value)


def paired_ratio(old: Parts, new: Parts, level: float) -> tuple[Interval, int] | None:
    """New over old on the prompts that both have, and their number; None for fewer than MIN_PAIRS or sums that are 0."""
    shared = [prompt for prompt in old if prompt in new]
    if len(shared) < MIN_PAIRS:
        return None
    above, below, new_above, new_below = np.array([(*old[prompt], *new[prompt]) for prompt in shared], dtype=np.float64).T
    sums = [math.fsum(part) for part in (above, below, new_above, new_below)]  # the same in any order: equal runs give 1
    if min(sums) <= 0:
        return None
    influence = new_above / sums[2] - new_below / sums[3] - above / sums[0] + below / sums[1]
    error = math.sqrt(len(shared) / (len(shared) - 1) * float(influence @ influence))
    reach = error * float(scipy.stats.t.ppf((1 + level) / 2, len(shared) - 1))
    value = (sums[2] / sums[3]) / (sums[0] / sums[1])
    return Interval(value=value, low=value * math.exp(-reach), high=value * math.exp(reach), level=level), len(shared)
