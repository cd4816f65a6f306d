"""Charts: their scale, their bars as letters, their bars on the page."""

from __future__ import annotations

import re

from outrider.report.document import Bar, Chart, Document
from outrider.report.html import to_html
from outrider.report.markdown import to_markdown
from tests.unit.report.browser import Page
from tests.unit.report.samples import chart, grouped_chart


def bars(*bars: Bar, **changes: float) -> Chart:
    return Chart("t", "setting", "speedup", {"": bars}, **changes)


def test_an_interval_without_an_end_does_not_flatten_the_bars() -> None:
    assert bars(Bar("a", "2", 2.0, 1.0, 2.2)).end == 2.2
    assert bars(Bar("a", "2", 2.0, 1.0, 900.0)).end == 2.6
    assert bars(Bar("a", "0.5", 0.5), baseline=1.0).end == 1.0
    assert bars(Bar("a", "0.5", 0.5), scale=4.0).end == 4.0
    assert bars().end == bars(Bar("a", "0", 0.0)).end == 1.0


def test_bars_of_letters_are_as_long_as_their_values() -> None:
    text = to_markdown(Document("x", "", [bars(Bar("a", "2", 2.0), Bar("b", "1", 1.0))]))
    assert [line.count("█") for line in text.splitlines() if "█" in line] == [24, 12]


def test_groups_have_headings_where_there_are_several() -> None:
    assert "| **prose** |  |  |" in to_markdown(Document("x", "", [grouped_chart()]))
    assert "<h4>prose</h4>" in to_html(Document("x", "", [grouped_chart()]))
    assert "<h4>" not in to_html(Document("x", "", [chart()]))


def test_the_page_draws_bars_intervals_and_the_baseline() -> None:
    html = to_html(Document("x", "", [chart()]))
    page = Page(html)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("rect") == 4
    assert tags.count("line") == 4 + 3  # a baseline each, and the intervals
    assert len(re.findall('class="bar good best"', html)) == 1
    shares = [float(width.removesuffix("%")) for width in page.attributes("width") if "%" in width]
    assert shares == [76.9, 53.5, 44.2, 41.1]
    assert 'x2="100.0%"' in html  # the interval that reaches beyond the scale
