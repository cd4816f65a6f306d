"""Costs and acceptance out of result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.lab.estimate.measured import read_known
from outrider.train.export_result import ExportResult

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
BENCH = RESULTS / "bench-2026-11-22.json"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A result without timed steps, as they were before 2026-11-22."""
    content = json.loads(BENCH.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        for one in cell["configurations"]:
            one.pop("step_s", None)
    path = tmp_path / "older.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("is_older", [False, True])
def test_the_fastest_chain_of_the_first_cell(older: Path, is_older: bool) -> None:
    """An older result has the two points that it predicted with: a plain step and one of the configuration."""
    known = read_known(older if is_older else BENCH, None, None)
    assert known.source.startswith("bench: draft-model k=5, reasoning, T = 0")
    points = {point.num_tokens for point in known.costs.target.points}
    assert points == {1, 6} if is_older else points > {1, 6}
    assert len(known.acceptance) == 5
    assert all(0 < chance <= 1 for chance in known.acceptance)


def test_what_is_named() -> None:
    known = read_known(BENCH, "ngram k=5", "code, T = 1")
    assert known.source == "bench: ngram k=5, code, T = 1"


@pytest.mark.parametrize(
    ("configuration", "cell", "said"),
    [
        ("ngram k=55", None, "Did you mean 'ngram k=5'"),
        (None, "cooking", "has no cell 'cooking'"),
        ("draft-model k=7 tree=best-first", None, "has no configuration"),
    ],
)
def test_what_is_not_there(configuration: str | None, cell: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_known(BENCH, configuration, cell)


def test_other_results_have_no_costs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ExportResult(drafter="medusa", layout="vllm", source="run", target="demo", checks=[]).write(path)
    with pytest.raises(ConfigError, match="of kind 'export'"):
        read_known(path, None, None)
