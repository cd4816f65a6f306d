"""Plots as SVG, and the numbers of plots as text."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from outrider.report.document import Plot, Series
from outrider.report.plots import to_svg
from outrider.report.plotted import aligned, figure, numbers, short, with_interval
from outrider.report.svg import COLOURS
from tests.unit.report.samples import HOSTILE, bars, grouped_bars, histogram, lines, logarithmic

ALL = [lines, bars, grouped_bars, histogram, logarithmic]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(plot: Plot) -> ET.Element:
    return ET.fromstring(to_svg(plot))


def words(root: ET.Element) -> list[str]:
    """What is written, not what is said on hover."""
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def titles(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}title")]


@pytest.mark.parametrize("make", ALL)
def test_the_picture_leaves_looks_to_the_page(make: type) -> None:
    """No style attribute (the policy forbids them), no style sheet (it would reach the page), no colour of its own."""
    svg = to_svg(make())
    root = ET.fromstring(svg)
    assert not [element for element in root.iter() if "style" in element.attrib or element.tag.endswith("}style")]
    colours = set(re.findall(r"#[0-9a-f]{6}", re.sub(r"var\(--[a-z0-9-]+,#[0-9a-f]{6}\)", "", svg)))
    assert not colours
    assert "var(--series-1," in svg
    assert "currentColor" in svg
    assert root.get("role") == "img"
    assert root.get("viewBox")
    assert "width" not in root.attrib


@pytest.mark.parametrize("make", ALL)
def test_equal_plots_give_equal_bytes(make: type) -> None:
    assert to_svg(make()) == to_svg(make())


def test_the_title_is_the_accessible_name() -> None:
    assert titles(drawn(lines()))[0] == "Speedup by draft length"


def test_text_stays_text() -> None:
    """Selectable, searchable, in the page's font: and large enough on a phone."""
    svg = to_svg(lines())
    assert {"draft length γ", "speedup", "12", "draft-model k=5"} <= set(words(ET.fromstring(svg)))
    assert "font-family" not in svg
    phone = 358 / float(str(ET.fromstring(svg).get("viewBox")).split()[2])
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)', svg)) * phone > 9


@pytest.mark.parametrize("make", ALL)
def test_every_point_says_its_numbers(make: type) -> None:
    plot = make()
    found = titles(drawn(plot))[1:]
    assert len(found) == sum(y is not None for series in plot.series for y in series.y)


def test_points_say_what_was_measured_there() -> None:
    """A gap in a series must not shift the numbers of the points behind it."""
    gap = Series("a", [1.5, None, 2.5], [1.0, None, 2.0], [2.0, None, 3.0])
    plot = Plot("t", "γ", "y", [1, 2, 4], [gap, Series("b", [9, 8, 7])])
    assert titles(drawn(plot))[1:] == ["a, 1: 1.50 [1.00, 2.00]", "a, 4: 2.50 [2.00, 3.00]", "b, 1: 9", "b, 2: 8", "b, 4: 7"]


def test_series_differ_without_colour() -> None:
    """Markers for lines, hatches for bars: also where there are more series than colours."""
    many = Plot("t", "x", "y", [1, 2], [Series(f"s{i}", [i, i + 1]) for i in range(len(COLOURS) + 2)])
    root = drawn(many)
    markers = [path for path in root.iter(f"{SVG}path") if path.get("id", "").startswith("plot-m")]
    shapes = {marker.get("d") for marker in markers if "var(--series" in str(marker.attrib)}
    assert len(shapes) >= len(COLOURS)
    assert len(list(drawn(grouped_bars()).iter(f"{SVG}pattern"))) == 1
    assert not list(drawn(bars()).iter(f"{SVG}pattern"))


def test_a_legend_only_where_there_is_a_choice() -> None:
    assert "speedup" not in words(drawn(bars()))
    assert "share of rejections" in words(drawn(grouped_bars()))
    assert "\u200b_odd" in words(drawn(Plot("t", "x", "y", [1], [Series("_odd", [1]), Series("b", [2])])))


def test_baseline_and_interval_are_drawn() -> None:
    with_both, without = lines(), Plot("t", "x", "y", [1, 2], [Series("s", [1, 2])])
    assert "stroke-dasharray" in to_svg(with_both)
    assert "stroke-dasharray" not in to_svg(without)
    assert to_svg(with_both).count("fill-opacity") == len(with_both.series)


def test_no_values_at_all() -> None:
    for series in ([], [Series("s", [None, math.nan])]):
        for kind in ("line", "bar"):
            assert "nothing was measured" in words(drawn(Plot("t", "x", "y", [1, 2], series, kind=kind)))


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="logarithmic axis cannot show 0"):
        to_svg(Plot("t", "x", "y", [0, 1], [Series("s", [1, 2])], log_x=True))
    with pytest.raises(ValueError, match="1 values over 2 places"):
        to_svg(Plot("t", "x", "y", [1, 2], [Series("s", [1, 2], [1])]))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_words(text: str) -> None:
    """Dollars are no formulas, control characters no broken XML."""
    series = [Series(text, [1.0, 2.0]), Series(text, [2.0, 1.0])]
    for kind in ("line", "bar"):
        assert drawn(Plot(text, text, text, [text, text], series, kind=kind)) is not None


def test_matplotlib_is_left_as_it_was() -> None:
    before = dict(mpl.rcParams)
    to_svg(lines())
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("value", "place", "measured"),
    [
        (0.0, "0", "0"), (1.0, "1", "1"), (1.5, "1.5", "1.50"), (0.01234, "0.0123", "0.0123"), (48.06, "48.1", "48.1"),
        (1234.6, "1235", "1235"), (1e9, "1e+09", "1e+09"), (2.34e-7, "2.34e-07", "2.34e-07"), (-0.5, "-0.5", "-0.500"),
        (None, "-", "-"), (math.inf, "-", "-"), (4096, "4096", "4096"), (100, "100", "100"),
    ],
)  # fmt: skip
def test_how_numbers_are_written(value: float | None, place: str, measured: str) -> None:
    assert short(value) == place
    assert figure(value) == measured


def test_intervals_end_at_the_same_decimal() -> None:
    assert with_interval(1.5, 1.4, 1.613) == "1.50 [1.40, 1.61]"
    assert with_interval(1.0, 0.9512, 1.05) == "1.00 [0.95, 1.05]"
    assert with_interval(0.0, -0.0123, 0.02) == "0.0000 [-0.0123, 0.0200]"
    assert with_interval(3.0, None, None) == "3"
    assert with_interval(2.0, 0.0, None) == "2.00 [0.00, -]"
    assert with_interval(None, 1.0, 2.0) == "-"


def test_values_in_a_row_end_at_the_same_decimal() -> None:
    assert aligned([1, 1.644, None, 0.0694]) == ["1.00", "1.64", "", "0.07"]
    assert aligned([1, 20, 3]) == ["1", "20", "3"]
    assert aligned([0.001, 12.5]) == ["0.00100", "12.5"]
    assert aligned([None]) == [""]


def test_numbers_of_a_plot() -> None:
    table = numbers(grouped_bars())
    assert [column.heading for column in table.columns] == ["region", "share of tokens", "share of rejections"]
    assert table.rows[1] == ["code", "0.120", "-"]
    assert [column.align for column in table.columns] == ["left", "right", "right"]
