"""The first table of docs/results is rendered from what was stored, and put between its marks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.unit.report.results import bench, cell, interval, measured

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def overview(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("overview")


def test_the_best_of_each_kind(overview: Any) -> None:
    """`bench` knows plain decoding, draft-model and suffix here; the faster one is of its own kind."""
    speeds = [None, interval(1.5, 1.4, 1.6), interval(1.2, 1.1, 1.3)]
    result = bench(cell(*(measured(number, speed) for number, speed in enumerate(speeds))))
    result.configurations[2].label = "suffix k=8"
    row = overview.row_of("a model", result, result.cells[0])
    assert row["trained"]["setting"] == "draft-model k=5"
    assert row["trained"]["speedup"] == 1.5
    assert row["untrained"]["setting"] == "suffix k=8"
    assert (row["equal"], row["compared"]) == (18, 18)
    content = {
        "hardware": {"cpu": "a CPU", "threads_used": 2},
        "date": "2026-01-01",
        "command": "python benchmarks/overview.py",
        "rows": [row, {**row, "trained": None, "compared": 0}],
    }
    text = overview.markdown(content)
    assert "| a model | 0 | 1 | 50 | `suffix k=8` 50 (1.20x [1.10, 1.30], 3.00) |" in text
    assert "| none at hand | sampled |" in text


def test_the_table_replaces_the_one_before(overview: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{overview.BEGIN}\nold\n{overview.END}\nafter\n")
    overview.write_page("new", page)
    assert page.read_text() == f"before\n{overview.BEGIN}\nnew\n{overview.END}\nafter\n"
    assert overview.BEGIN in overview.PAGE.read_text()
