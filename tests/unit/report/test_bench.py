"""What a bench advises, and numbers of it that the golden reports do not show."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from outrider.lab.result import Interval, comparables, read_result
from outrider.report.bench import advice, document
from outrider.report.console import print_document
from outrider.report.document import Plot
from tests.unit.report.results import GAIN, bench, cell, interval, measured


@pytest.mark.parametrize(
    ("first", "second", "words", "tone"),
    [
        (
            interval(0.9, 0.8, 0.95),
            interval(0.7, 0.6, 0.8),
            "do not speculate on reasoning, T = 0: the fastest is draft-model k=5: 0.90x",
            "bad",
        ),
        (interval(1.1, 0.95, 1.3), None, "may be no gain", "caution"),
        (interval(1.01, 0.95, 1.1), None, "do not speculate", "bad"),
        (Interval.unknown(3.0), None, "says nothing about others", "caution"),
        (None, None, "nothing was compared", "caution"),
    ],
)
def test_doubt_is_reported_too(
    first: Interval | None, second: Interval | None, words: str, tone: str
) -> None:
    one = cell(measured(0), measured(1, first), measured(2, second))
    found = advice(bench(one), one)
    assert words in found[0]
    assert found[1] == tone


def test_lossy_configurations_are_never_the_advice() -> None:
    found = bench(GAIN)
    found.configurations[1].lossless = False
    assert "do not speculate" in advice(found, GAIN)[0]


def test_the_report_fits_a_terminal_of_100_columns() -> None:
    file = io.StringIO()
    print_document(document(bench(GAIN)), Console(file=file, width=100, highlight=False))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "1.90x [1.80, 2.00]" in text
    assert "All 18 texts that must be the plain ones are" in text
    assert "all rounds were run" in text


def test_positions_that_hardly_any_step_reached_are_not_plotted() -> None:
    plots = {
        block.title: block for block in document(bench(GAIN)).blocks if isinstance(block, Plot)
    }
    survival = plots["Survival: reasoning, T = 0"]
    assert list(survival.x) == [1, 2]
    assert list(survival.series[0].y) == pytest.approx([25 / 30, 25 / 30 * 20 / 25])


def test_the_file_takes_it(tmp_path: Any) -> None:
    found = bench(GAIN)
    found.write(tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == found


def test_numbers_that_compare_with_another_run() -> None:
    found = comparables(
        bench(GAIN, cell(measured(0), measured(1, Interval.unknown(3.0)), batch_size=2))
    )
    assert found["reasoning, T = 0: draft-model k=5: speedup"].value == Interval(
        value=1.9, low=1.8, high=2.0
    )
    assert found["reasoning, T = 0: none: tokens/s"].value == Interval(value=50, low=45, high=55)
    assert found["reasoning, T = 0: suffix: identical texts"].value == 1
    lonely = found["reasoning, T = 0, 2 at once: draft-model k=5: speedup"].value
    assert isinstance(lonely, Interval)
    assert (lonely.low, lonely.high) == (0, float("inf"))
