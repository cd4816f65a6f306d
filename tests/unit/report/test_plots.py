"""Plots as SVG, and the numbers of plots as text."""

from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from outrider.report.document import Plot, Series
from outrider.report.plots import COLOURS, figure, numbers, short, to_image, to_svg, with_interval
from tests.unit.report.samples import HOSTILE, alone, gaps, lines, logarithmic

ALL = [lines, gaps, alone, logarithmic]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(plot: Plot) -> ET.Element:
    return ET.fromstring(to_svg(plot))


def words(root: ET.Element) -> list[str]:
    """Everything that is written."""
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("make", ALL)
def test_equal_plots_give_equal_bytes(make: type) -> None:
    assert to_svg(make()) == to_svg(make())


def test_text_stays_text_and_is_large_enough_on_a_phone() -> None:
    svg = to_svg(lines())
    assert {"draft length γ", "speedup", "12", "draft-model k=5"} <= set(words(ET.fromstring(svg)))
    phone = 358 / float(str(ET.fromstring(svg).get("viewBox")).split()[2])
    assert min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)) * phone > 9


def test_more_series_than_colours_differ_by_their_markers() -> None:
    many = Plot(
        "t", "x", "y", [1, 2], [Series(f"s{i}", [i, i + 1]) for i in range(len(COLOURS) + 2)]
    )
    assert len({path.get("d") for path in drawn(many).iter(f"{SVG}path")}) > len(COLOURS)


def test_an_image_holds_the_picture() -> None:
    head, _, content = to_image(lines()).partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(content).decode() == to_svg(lines())


def test_a_legend_only_where_there_is_a_choice() -> None:
    assert "α" not in words(drawn(alone()))
    assert {"prose", "code"} <= set(words(drawn(gaps())))
    assert "\u200b_odd" in words(
        drawn(Plot("t", "x", "y", [1], [Series("_odd", [1]), Series("b", [2])]))
    )


def test_baseline_and_interval_are_drawn() -> None:
    with_both = lines()
    without = Plot("t", "x", "y", [1, 2], [Series("s", [1, 2])])
    assert "stroke-dasharray" in to_svg(with_both)
    assert to_svg(with_both).count("FillBetween") >= len(with_both.series)
    assert "stroke-dasharray: 4" not in to_svg(without)


def test_no_values_at_all() -> None:
    for series in ([], [Series("s", [None, math.nan])]):
        assert "nothing was measured" in words(drawn(Plot("t", "x", "y", [1, 2], series)))


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="logarithmic axis cannot show 0"):
        to_svg(Plot("t", "x", "y", [0, 1], [Series("s", [1, 2])], log_x=True))
    with pytest.raises(ValueError, match="1 values over 2 of x"):
        to_svg(Plot("t", "x", "y", [1, 2], [Series("s", [1, 2], [1])]))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_words(text: str) -> None:
    """Dollars are no formulas, control characters no broken XML."""
    series = [Series(text, [1.0, 2.0]), Series(text, [2.0, 1.0])]
    assert drawn(Plot(text, text, text, [1, 2], series)) is not None


def test_matplotlib_is_left_as_it_was() -> None:
    before = dict(mpl.rcParams)
    to_svg(lines())
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("value", "shown", "measured"),
    [
        (0.0, "0", "0"),
        (1.0, "1", "1"),
        (1.5, "1.5", "1.50"),
        (0.01234, "0.0123", "0.0123"),
        (48.06, "48.1", "48.1"),
        (1234.6, "1235", "1235"),
        (1e9, "1e+09", "1e+09"),
        (2.34e-7, "2.34e-07", "2.34e-07"),
        (-0.5, "-0.5", "-0.500"),
        (None, "-", "-"),
        (math.inf, "-", "-"),
        (4096, "4096", "4096"),
        (100, "100", "100"),
    ],
)
def test_how_numbers_are_written(value: float | None, shown: str, measured: str) -> None:
    assert short(value) == shown
    assert figure(value) == measured


def test_intervals_end_at_the_same_decimal() -> None:
    assert with_interval(1.5, 1.4, 1.613) == "1.50 [1.40, 1.61]"
    assert with_interval(1.0, 0.9512, 1.05) == "1.00 [0.95, 1.05]"
    assert with_interval(0.0, -0.0123, 0.02) == "0.0000 [-0.0123, 0.0200]"
    assert with_interval(3.0, None, None) == "3"
    assert with_interval(2.0, 0.0, None) == "2.00 [0.00, -]"
    assert with_interval(None, 1.0, 2.0) == "-"


def test_numbers_of_a_plot() -> None:
    table = numbers(gaps())
    assert [column.heading for column in table.columns] == ["position", "prose", "code"]
    assert table.rows[1] == ["2", "0.820", "-"]
