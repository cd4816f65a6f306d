"""Stored results: short ones are plain JSON, long ones compressed, and every script reads both."""

from __future__ import annotations

import gzip
import json
import re
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
RESULTS = BENCHMARKS / "results"
LONG = {"cells": [{"name": f"cell {number}", "value": number / 7} for number in range(5000)]}
SHORT = {"cells": [0.1, 1e-300, "ä"]}


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("workload")


@pytest.mark.parametrize(("content", "ending"), [(SHORT, ".json"), (LONG, ".json.gz")])
def test_what_is_stored_is_read_again(
    workload: Any, tmp_path: Path, content: dict[str, Any], ending: str
) -> None:
    path = workload.store(content, tmp_path / "new" / "a-2026-01-01.json")
    assert path.name == f"a-2026-01-01{ending}"
    assert workload.read_result(path) == content


def test_a_stored_result_keeps_paths_without_the_folders_of_this_machine(
    workload: Any, tmp_path: Path
) -> None:
    notes = [
        f"'{workload.SHARED}/models/a.gguf' keeps its blocks",
        f"{workload.REPOSITORY}/outrider",
    ]
    path = workload.store({"notes": notes}, tmp_path / "a.json")
    assert workload.read_result(path) == {"notes": ["'models/a.gguf' keeps its blocks", "outrider"]}


def test_the_same_content_is_the_same_bytes(
    workload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a time stamp in the compressed file: git would see a change in every run."""
    before = workload.store(LONG, tmp_path / "a.json").read_bytes()
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert workload.store(LONG, tmp_path / "a.json").read_bytes() == before
    assert before[4:8] == bytes(4)
    assert len(before) < len(json.dumps(LONG)) / 2


def test_a_result_of_the_same_name_is_not_left_beside_the_new_one(
    workload: Any, tmp_path: Path
) -> None:
    """Catches the older of two endings that a reader finds first."""
    for content in (LONG, SHORT, LONG):
        path = workload.store(content, tmp_path / "a.json")
        assert [*tmp_path.iterdir()] == [path]


def test_a_written_result_has_its_head_and_is_compressed_where_long(
    workload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "hardware", lambda threads: {"threads_used": threads})
    monkeypatch.setattr(
        "sys.argv", [str(tmp_path / "study.py"), str(tmp_path / "models" / "small"), "--limit", "3"]
    )
    path = workload.write_result("study", LONG, 3, tmp_path)
    assert path.name.startswith("study-")
    assert path.name.endswith(".json.gz")
    content = json.loads(gzip.decompress(path.read_bytes()))
    assert (content["benchmark"], content["hardware"], content["cells"]) == (
        "study",
        {"threads_used": 3},
        LONG["cells"],
    )
    assert content["command"] == "python benchmarks/study.py models/small --limit 3"


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.name)
def test_a_kept_result_names_no_folder_of_the_machine_that_made_it(path: Path) -> None:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    assert not re.findall(r"[ \"'](/(?:work|root|home|tmp)/[^ \"']*)", text)


@pytest.mark.parametrize("packed", [False, True])
def test_drafters_renders_plain_and_compressed_results_alike(
    workload: Any, tmp_path: Path, packed: bool
) -> None:
    """By its command line, as the page gives it."""
    drafters = import_module("drafters")
    stored = RESULTS / "drafters-composite-2026-11-21.json"
    path = tmp_path / "copy.json"
    data = stored.read_bytes()
    if packed:
        path = path.with_name("copy.json.gz")
        data = gzip.compress(data, mtime=0)
    path.write_bytes(data)
    app = typer.Typer()
    app.command()(drafters.main)
    shown = CliRunner().invoke(app, ["--render", str(path)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.strip() == drafters.markdown(workload.read_result(stored)).strip()


def test_no_kept_result_is_long_and_plain(workload: Any) -> None:
    """A result of `outrider bench` is an exception: `outrider estimate` reads it as it is."""
    long = [
        file.name for file in RESULTS.glob("*.json") if file.stat().st_size > workload.PLAIN_BYTES
    ]
    assert [name for name in long if not name.startswith("bench-")] == []


def test_the_page_of_drafters_has_the_numbers_of_its_results(workload: Any) -> None:
    """Every row of its tables, against what the stored results render to; a dash stands for what
    was not measured."""
    report = import_module("drafters_report")
    page = (
        (BENCHMARKS.parent / "docs" / "results" / "drafters.md")
        .read_text(encoding="utf-8")
        .replace("**", "")
    )
    speeds, gains = page.split("## What single changes gain")
    cells = workload.read_result(RESULTS / "drafters-bits-2026-11-28.json.gz")["cells"]
    of = {
        (cell["workload"], cell["temperature"]): cell for cell in cells if cell["pair"] == "shared"
    }
    greedy = [of[name, 0] for name in ("gsm8k", "code", "summarization", "rag", "repeat")]
    columns = [*greedy, of["gsm8k", 1], of["code", 1]]
    known = {tuple(row[1:]) for row in _rows(report._speedups(columns).replace("|  |", "| - |"))}
    shown = [tuple(row[1:]) for row in _rows(speeds)][1:]
    assert len(shown) == 17
    assert set(shown) <= known
    stored = [
        f"{name}-2026-11-21.json{end}"
        for name, end in (("drafters", ".gz"), ("drafters-composite", ""))
    ]
    known_gains = "".join(
        report._gain_table(workload.read_result(RESULTS / name)["gains"]) for name in stored
    )
    found = re.findall(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", gains)
    assert len(found) == 12
    assert [one for one in found if one not in known_gains] == []


def _rows(table: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return [line for line in lines if not line[0].startswith("---")]
