"""Which cells `drafters.py --again` measures once more, and on which prompts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SHARED = BENCHMARKS.parent.parent / "shared"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("drafters")


def regret(workload: str, best: float, plain: float, name: str = "ngram auto") -> dict[str, Any]:
    cell = {
        "pair": "demo",
        "workload": workload,
        "temperature": 0.7,
        "configuration": name,
        "rivals": ["none", "ngram k=3"],
    }
    return cell | {"over_best_fixed": {"median": best}, "over_plain": {"median": plain}}


def result(*regrets: dict[str, Any], skip: int = 0) -> dict[str, Any]:
    plan = {
        "pairs": ["demo"],
        "workloads": ["gsm8k", "rag", "mt"],
        "temperatures": [0.7],
        "prompts": 16,
        "max_tokens": 64,
        "threads": 2,
        "mlp": 0,
        "runtime": "native",
        "verifier": "gumbel",
        "skip": skip,
    }
    return {"regrets": [*regrets], "plan": plan}


def plan(bench: Any, prompts: int) -> Any:
    return bench.Plan(
        ["shared"],
        ["code"],
        [0.0],
        ["none"],
        True,
        prompts,
        32,
        2,
        24,
        4,
        1,
        10368,
        "eager",
        "auto",
    )


def test_cells_below_either_floor_with_their_rivals_only(bench: Any) -> None:
    content = result(
        regret("gsm8k", 0.99, 0.97), regret("rag", 0.96, 1.2), regret("mt", 0.97, 0.98)
    )
    assert bench.below_a_floor(content) == {
        "demo gsm8k T=0.7": ["none", "ngram k=3", "ngram auto"],
        "demo rag T=0.7": ["none", "ngram k=3", "ngram auto"],
    }


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")
def test_the_settings_are_the_results_and_the_prompts_are_others(bench: Any) -> None:
    content = result(regret("rag", 0.96, 1.2), skip=8)
    again = bench.repeated(plan(bench, 20), content)
    assert (again.cells(), again.skip, again.prompts, again.rounds) == (
        [("demo", "rag", 0.7)],
        24,
        20,
        2,
    )
    assert (again.verifier, again.max_tokens, again.gain_prompts) == ("gumbel", 64, 0)
    assert again.names("demo", "rag", 0.7) == ["none", "ngram k=3", "ngram auto"]
    with pytest.raises(typer.BadParameter, match="rag has 26 prompts after the first 24"):
        bench.repeated(plan(bench, 27), content)
    with pytest.raises(typer.BadParameter, match="no auto"):
        bench.repeated(plan(bench, 20), result(regret("rag", 0.98, 1.2)))


def stored(*rates: tuple[float, float], best: str = "ngram k=3") -> dict[str, Any]:
    """A result of one cell: per prompt, how fast `auto` and the fixed length were; plain decoding
    says 1 token a second."""
    line = "0 {} {} 60 30 60 50 40 abcd 0.0"
    columns = "round prompt seconds emitted steps drafted tested accepted text other_cpu"
    runs = {
        "none": [line.format(prompt, 60.0) for prompt in range(len(rates))],
        best: [line.format(prompt, 60 / fixed) for prompt, (_, fixed) in enumerate(rates)],
        "ngram auto": [line.format(prompt, 60 / auto) for prompt, (auto, _) in enumerate(rates)],
    }
    drafters = {"none": ("none", 0), best: ("ngram", 3), "ngram auto": ("ngram", "auto:8")}
    configurations = {
        name: {"drafter": drafter, "options": {}, "verifier": "gumbel", "num_draft_tokens": length}
        for name, (drafter, length) in drafters.items()
    }
    cell = {"pair": "demo", "workload": "rag", "temperature": 0.7, "runs": runs}
    return {"configurations": configurations, "run_columns": columns, "cells": [cell]}


def test_results_of_one_cell_are_one_cell_of_all_their_prompts(bench: Any) -> None:
    """Catches a prompt of one result that stands for the other's of the same number, and a cell
    counted twice."""
    lines = bench.together(
        [stored((0.9, 1.0), (0.9, 1.0)), stored((2.0, 2.0), (2.1, 2.0), (2.0, 2.0))]
    ).splitlines()
    (row,) = [line for line in lines if line.startswith("| demo ")]
    cells = [part.strip() for part in row.strip("|").split("|")]
    assert cells[4] == "ngram k=3"
    assert (cells[5][:5], cells[6], cells[8][:5]) == ("1.00 ", "5", "2.00 ")
    assert [line.split("|")[4].split()[:3] for line in lines if line.startswith("| auto / ")] == [
        ["0", "of", "1"]
    ] * 2
