"""The model card of a drafter: front matter that the hub reads, and the result's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import BenchResult, ConfigurationInfo
from outrider.report.card import card, licence_of, read_bench
from tests.unit.report.results import (
    bench,
    cell,
    compared_servers,
    interval,
    measured,
    pinned,
    replay_result,
)


def of_a_head(**changes: Any) -> BenchResult:
    """A bench of plain decoding and of two settings of a head, on two kinds of text."""
    settings = [
        ConfigurationInfo(label=label, arguments={"drafter": label.split()[0]}, baseline=0)
        for label in ("none", "eagle3 k=3", "eagle3 k=7")
    ]
    speeds = [None, interval(1.5, 1.4, 1.6), interval(1.8, 1.7, 1.9)]
    cells = [
        cell(*(measured(number, speed) for number, speed in enumerate(speeds)), task=task)
        for task in ("chat", "code")
    ]
    return bench(*cells, **{"configurations": settings, "command": "outrider bench t", **changes})


def made(result: BenchResult, **changes: Any) -> str:
    about = {
        "kind": "eagle3",
        "layout": "speculators",
        "target": "org/target",
        "name": "my-head",
        "licence": "apache-2.0",
    }
    return card(result, **{**about, **changes})


def test_the_hub_reads_what_it_is_and_whom_it_drafts_for() -> None:
    data = ModelCard(made(of_a_head())).data
    assert data.base_model == "org/target"
    assert data.license == "apache-2.0"
    assert data.library_name == "speculators"
    assert data.tags == ["speculative-decoding", "eagle3"]


def test_numbers_by_kind_of_text_and_how_they_were_made() -> None:
    text = made(pinned(of_a_head()))
    assert "Fastest setting measured: eagle3 k=7, 1.80x [1.70, 1.90]" in text
    rows = [line for line in text.splitlines() if line.startswith(("| chat", "| code"))]
    assert len(rows) == 8, "two kinds, two settings, acceptance and speed"
    assert rows[0].startswith("| chat (greedy) | eagle3 k=7 | 3.00 |")
    assert "0.83 0.80 0.50" in rows[0]
    assert "vllm serve my-head" in text
    assert "outrider serve org/target --draft my-head" in text
    assert "processor: a CPU" in text
    assert "command: outrider bench t" in text
    assert "plain decoding |" not in text


def test_a_result_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no measurement of a drafter 'medusa', only of none,"):
        made(of_a_head(), kind="medusa")
    with pytest.raises(ConfigError, match="result is of a server"):
        made(bench(target=None, servers=compared_servers()))
    path = tmp_path / "result.json"
    replay_result().write(path)
    with pytest.raises(ConfigError, match="is a result of replay; a card needs one of bench"):
        read_bench(path)


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        ("---\nlicense: mit\n---\nText", "mit"),
        ("no front matter", "unknown"),
        ("---\n[broken: {\n---\n", "unknown"),
        ("---\n- a list\n---\n", "unknown"),
        ("---\nlicense:\n  - 3\n---\n", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_licence_of_a_target(tmp_path: Path, readme: str | None, licence: str) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    assert licence_of(str(tmp_path)) == licence
    assert licence_of("nobody/nothing") == "unknown"
    assert licence_of("no/such/name at all") == "unknown"
