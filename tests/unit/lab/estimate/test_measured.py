"""Costs and acceptance out of result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.lab.estimate.measured import read_known

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
BENCH = RESULTS / "bench-2026-11-22.json"


@pytest.mark.parametrize(
    ("file", "points"),
    [
        (BENCH, {1, 6}),
        (RESULTS / "bench-2026-11-21.json", {1, 6}),  # an older file, without timed steps: the two that it predicted with
    ],
)
def test_the_fastest_chain_of_the_first_cell(file: Path, points: set[int]) -> None:
    known = read_known(file, None, None)
    assert known.source.startswith("bench: draft-model k=5, reasoning, T = 0")
    assert points <= {point.num_tokens for point in known.costs.target.points}
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


def test_other_results_have_no_costs() -> None:
    with pytest.raises(ConfigError, match="of kind 'reasoning'"):
        read_known(RESULTS / "reasoning-2026-11-22.json", None, None)
