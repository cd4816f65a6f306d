"""Two results side by side: intervals, verdicts, thresholds, and what differs between the runs."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from scipy.stats import norm

from outrider.errors import ConfigError
from outrider.lab.compare import Comparison, compare, difference, ratio
from outrider.lab.result import Comparable, Interval, Record, Result, comparables
from outrider.report.compare import document
from outrider.report.document import Paragraph, Table

MACHINE = {"cpu": "A", "threads": 2, "memory_bytes": 1000, "cores": {"usable": 2}}


class Sample(Result):
    """A result that chooses its numbers."""

    kind: Literal["bench"] = "bench"
    numbers: list[Any] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)
    seconds: float = 1.0
    target: str = "demo"

    def comparable(self) -> list[Comparable]:
        return [one if isinstance(one, Comparable) else Comparable(*one) for one in self.numbers]


class Cell(Record):
    task: str
    batch_size: int
    speedup: Interval
    ttft_s: Interval | None = None
    odd: Interval | None = None


class Plain(Result):
    """A result without the method."""

    kind: Literal["tune"] = "tune"
    cells: list[Cell] = Field(default_factory=list)
    others: list[Interval] = Field(default_factory=list)
    by_task: dict[str, Interval] = Field(default_factory=dict)


def within(value: float, width: float, level: float = 0.95) -> Interval:
    return Interval(value=value, low=value - width, high=value + width, level=level)


def sample(*numbers: Any, **fields: Any) -> Sample:
    return Sample(
        **({"numbers": list(numbers), "machine": MACHINE, "versions": {"outrider": "1"}} | fields)
    )


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {change.label: change.verdict for change in comparison.changes}


def test_a_difference_of_normal_means_has_the_textbook_interval() -> None:
    z = norm.ppf(0.975)
    found = difference(within(1.0, 0.3 * z), within(3.0, 0.4 * z))
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 0.5 * z, 2 + 0.5 * z))


def test_two_levels_are_claimed_as_the_lower_one() -> None:
    """What holds at 99 % holds at 90 %; the other way about it would be more than was measured."""
    assert difference(within(1.0, 0.3, 0.99), within(3.0, 0.4, 0.9)).level == 0.9


def test_a_ratio_is_the_difference_of_logarithms() -> None:
    old = Interval(value=2.0, low=2 * math.exp(-0.3), high=2 * math.exp(0.1))
    new = Interval(value=3.0, low=3 * math.exp(-0.2), high=3 * math.exp(0.4))
    found = ratio(old, new)
    assert found.value == pytest.approx(1.5)
    assert math.log(found.low / 1.5) == pytest.approx(-math.hypot(0.2, 0.1))  # new low, old high
    assert math.log(found.high / 1.5) == pytest.approx(math.hypot(0.4, 0.3))


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Two simulated benches of 40 prompts, many times: 95 % of the intervals hold the true ratio."""
    rng = np.random.default_rng(7)
    z = norm.ppf(0.975)
    covered = 0
    for _ in range(2000):
        runs = [rng.normal(mean, 0.2, 40) for mean in (1.5, 1.2)]
        old, new = (within(float(r.mean()), z * float(r.std(ddof=1)) / 40**0.5) for r in runs)
        found = ratio(old, new)
        covered += found.low <= 1.2 / 1.5 <= found.high
    assert 0.935 < covered / 2000 < 0.965


def test_open_intervals_stay_open() -> None:
    nothing_known = Interval(value=1.0, low=0.0, high=math.inf)
    found = ratio(nothing_known, within(2.0, 0.1))
    assert (found.value, found.low, found.high) == (2.0, 0.0, math.inf)
    assert difference(nothing_known, 2.0).low == -math.inf


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 0.09), st.floats(0, 0.09))
def test_swapping_old_and_new_turns_the_ratio(a: float, b: float, wa: float, wb: float) -> None:
    there = ratio(within(a, wa), within(b, wb))
    back = ratio(within(b, wb), within(a, wa))
    assert there.value == pytest.approx(1 / back.value)
    assert there.low == pytest.approx(1 / back.high)
    assert there.low <= there.value <= there.high


def test_verdicts() -> None:
    old = sample(
        ("speed", within(1.0, 0.02), True),
        ("slow", within(1.0, 0.02), True),
        ("noise", within(1.0, 0.2), True),
        ("seconds", within(1.0, 0.02), False),
        ("neither", within(1.0, 0.02), None),
        ("count", 3.0, True),
        ("size", 3.0, False),
        ("share", within(0.0, 0.02), True, "", "difference"),
        ("gain", within(-0.1, 0.02), True),
    )
    new = sample(
        ("speed", within(1.2, 0.02), True),
        ("slow", within(0.8, 0.02), True),
        ("noise", within(1.1, 0.2), True),
        ("seconds", within(1.2, 0.02), False),
        ("neither", within(1.2, 0.02), None),
        ("count", 3.0, True),
        ("size", 3.1, False),
        ("share", within(0.1, 0.02), True, "", "difference"),
        ("gain", within(-0.2, 0.02), True),
    )
    found = compare(old, new)
    assert verdicts(found) == {
        "speed": "better",
        "slow": "worse",
        "noise": "no evidence",
        "seconds": "worse",
        "neither": "higher",
        "count": "same",
        "size": "worse",
        "share": "better",
        "gain": "worse",
    }
    by_label = {change.label: change for change in found.changes}
    assert by_label["share"].change.value == pytest.approx(0.1)
    assert by_label["gain"].scale == "difference"  # a ratio of negative numbers says nothing


def test_what_differs_between_runs() -> None:
    one = ("a", within(1, 0.1), True)
    old = sample(one, settings={"temperature": 0.0, "tasks": ["x"]}, command="c1")
    new = sample(
        one,
        settings={"temperature": 0.7, "tasks": ["x", "y"]},
        command="c2",
        seconds=2.0,
        target="big",
        machine=MACHINE | {"threads": 4, "memory_bytes": 1010, "cores": {"usable": 4}},
        versions={"outrider": "2"},
    )
    found = compare(old, new)
    assert {d.what: (d.old, d.new) for d in found.machines} == {
        "threads": ("2", "4"),
        "cores": ("usable 2", "usable 4"),
    }
    assert found.others[0].what == "outrider"
    assert (found.others[0].old, found.others[0].new) == ("1", "2")
    assert {d.what for d in found.others} == {"outrider", "temperature", "tasks", "command"}
    assert found.old.versions["outrider"] == "1"
    assert compare(old, sample(one, machine=MACHINE | {"memory_bytes": 2000})).machines


def test_kinds_and_cells_must_match() -> None:
    one = sample(("a", within(1, 0.1)))
    with pytest.raises(ConfigError, match="'bench' cannot be compared with one of 'tune'"):
        compare(one, Plain())
    with pytest.raises(ConfigError, match="no number to compare"):
        compare(one, sample())
    with pytest.raises(
        ConfigError, match="no number in common: the old one has 'a', the new one 'b'"
    ):
        compare(one, sample(("b", within(1, 0.1))))
    found = compare(sample(("a", 1.0), ("gone", 1.0)), sample(("new", 1.0), ("a", 1.0)))
    assert (found.only_old, found.only_new) == (("gone",), ("new",))


def test_one_label_for_two_numbers_is_a_bug() -> None:
    with pytest.raises(ValueError, match="two numbers called 'a'"):
        comparables(sample(("a", 1.0), ("a", 2.0)))


def test_the_report_says_machines_first_and_counts_verdicts() -> None:
    numbers = [("a", within(1, 0.01), True, "x"), ("b", within(1, 0.01), True)]
    old = sample(*numbers)
    new = sample(("a", within(0.9, 0.01), True, "x"), numbers[1], machine=MACHINE | {"cpu": "B"})
    blocks = document(compare(old, new)).blocks
    assert isinstance(blocks[0], Paragraph)
    assert blocks[0].tone == "bad"
    assert "Different machines" in blocks[0].text
    tables = {block.title: block for block in blocks if isinstance(block, Table)}
    assert tables["All numbers"].rows[0] == [
        "a, x ↑",
        "✗ worse",
        "x 0.900 [0.887, 0.914]",
        "1.00 [0.99, 1.01]",
        "0.900 [0.890, 0.910]",
    ]
    assert tables["All numbers"].marked == {0}
    texts = [block.text for block in blocks if isinstance(block, Paragraph)]
    assert "Of 2 numbers: 1 worse, 1 without evidence of a change." in texts
    same = document(compare(old, old)).blocks
    assert [block.tone for block in same if isinstance(block, Paragraph)] == ["plain", "plain"]
