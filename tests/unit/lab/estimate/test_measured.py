"""Costs and acceptance out of result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.lab.estimate.measured import read_known
from outrider.train.export_result import ExportResult
from tests.unit.report import results


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """Two cells: in the second one the look-up is faster."""
    plain, tree = results.measured(0), results.measured(3, results.interval(9, 8, 10))
    model, lookup = results.measured(1, results.interval(2, 1.9, 2.1)), results.measured(2, results.interval(1.5, 1.4, 1.6))
    best = results.measured(2, results.interval(3, 2.9, 3.1))
    labels = ("none", "draft-model k=5", "ngram k=5", "draft-model k=7 tree=best-first")
    infos = [results.ConfigurationInfo(label=label, arguments={}, baseline=0) for label in labels]
    cells = [results.cell(plain, model, lookup, tree), results.cell(plain, model, best, task="code", temperature=1.0)]
    path = tmp_path / "bench.json"
    results.bench(*cells, configurations=infos).write(path)
    return path


def test_the_fastest_chain_of_the_first_cell(bench: Path) -> None:
    known = read_known(bench, None, None)
    assert known.source == "bench: draft-model k=5, reasoning, T = 0"
    assert [(point.num_tokens, point.seconds) for point in known.costs.target.points] == [(1, 0.013), (2, 0.015), (6, 0.02)]
    assert known.acceptance == pytest.approx([25 / 30, 20 / 25, 1 / 2])


@pytest.mark.parametrize("configuration", [None, "ngram k=5"])
def test_what_is_named(bench: Path, configuration: str | None) -> None:
    assert read_known(bench, configuration, "code, T = 1").source == "bench: ngram k=5, code, T = 1"


@pytest.mark.parametrize(
    ("configuration", "cell", "message"),
    [
        ("ngram k=55", None, "Did you mean 'ngram k=5'"),
        (None, "cooking", "has no cell 'cooking'"),
        ("draft-model k=7 tree=best-first", None, "has no configuration"),
    ],
)
def test_what_is_not_there(bench: Path, configuration: str | None, cell: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_known(bench, configuration, cell)


def test_other_results_have_no_costs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ExportResult(drafter="medusa", layout="vllm", source="run", target="demo", checks=[]).write(path)
    with pytest.raises(ConfigError, match="of kind 'export'"):
        read_known(path, None, None)
