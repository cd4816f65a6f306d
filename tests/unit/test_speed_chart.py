"""The picture in README, its table, and the stored result say the same."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

from tools.speed_chart import ENGINES, PICTURE, RESULT, ROOT, draw, speeds

ROW = re.compile(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| \*\*(\d+)\*\* \|$", re.MULTILINE)


def test_the_picture_is_what_the_stored_result_gives() -> None:
    """`python -m tools.pictures MODEL speed` draws it anew."""
    assert PICTURE.read_text(encoding="utf-8") == draw()


def test_the_table_has_the_same_numbers() -> None:
    rows = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    table = speeds(json.loads(RESULT.read_text(encoding="utf-8")))
    expected = [(kind, *map(str, row.values())) for kind, row in table.items()]
    assert rows == expected


def test_it_has_a_bar_for_each_number_and_a_look_for_dark_pages() -> None:
    picture = ET.fromstring(draw())
    bars = [rect for rect in picture.iter() if str(rect.get("class")).startswith("engine")]
    assert len(bars) == 6 * len(ENGINES) + len(ENGINES)  # and the legend
    assert "prefers-color-scheme: dark" in draw()
