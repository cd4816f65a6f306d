"""`make mutants`: the table of faults fits today's code, and the runner tells what is found from
what is not."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import (
    ROOT,
    Mutant,
    Outcome,
    is_enough,
    read,
    read_mutants,
    store,
    summary,
    table,
    try_mutant,
)

SOURCE = "def larger(a: int, b: int) -> int:\n    return a if a > b else b\n"
TEST = """
import time
from code_of import larger

def test_the_first():
    assert larger(2, 1) == 2

def test_time():
    if larger(1, 3) == 1:
        time.sleep(600)
"""
BROKEN = "def test_never():\n    assert False\n"


def test_every_fault_can_be_put_in() -> None:
    """Catches an entry that no longer fits the code: its text occurs once, and with the fault it
    still parses."""
    table = read_mutants()
    for mutant in table:
        ast.parse(mutant.mutated(ROOT))
        assert mutant.tests, mutant.name
        assert mutant.old != mutant.new, mutant.name
        assert all((ROOT / test).exists() for test in mutant.tests), mutant.name
    names = [mutant.name for mutant in table]
    assert len(names) == len(set(names)) >= 50


@pytest.mark.parametrize(("old", "count"), [("a < b", 0), ("b", 3)])
def test_an_entry_that_does_not_fit_is_named(tmp_path: Path, old: str, count: int) -> None:
    (tmp_path / "code_of.py").write_text(SOURCE)
    with pytest.raises(
        ValueError,
        match=rf"mutant 'odd': its old text occurs {count} times in code_of.py, expected once",
    ):
        Mutant("odd", "code_of.py", old, "", []).mutated(tmp_path)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree of one file and its tests."""
    for name, text in (("code_of.py", SOURCE), ("test_code.py", TEST), ("test_broken.py", BROKEN)):
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n slow\n nightly\n gpu\n")
    return tmp_path


@pytest.mark.slow
def test_verdicts(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by name, and only by a test that passes without the fault; afterwards the file is as it
    was."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for new, test, verdict, found_by, limit_s in (
        ("a < b", "test_code.py", "found", "test_code.py::test_the_first", 60),
        ("a >= b", "test_code.py", "survived", "", 60),
        ("a > 0", "test_code.py", "took too long", "", 5),
        ("a <", "test_code.py", "not run", "", 60),
        ("a < b", "code_of.py", "not run", "", 60),
        ("a < b", "test_broken.py", "broken test", "test_broken.py::test_never", 60),
    ):
        outcome = try_mutant(Mutant("one", "code_of.py", "a > b", new, [test]), copy, limit_s)
        assert (outcome.verdict, outcome.found_by) == (verdict, found_by)
        assert (copy / "code_of.py").read_text() == SOURCE


def test_a_fault_of_the_same_size_and_second_is_compiled(tmp_path: Path) -> None:
    """Python knows a compiled source by its size and second alone: without care the next run has
    the earlier text."""
    path = tmp_path / "code_of.py"
    for text in ("value = 1\n", "value = 2\n"):
        mutants.replace_source(path, text)
        os.utime(path, (1_000_000_000, 1_000_000_000))
        command = [sys.executable, "-c", "import code_of; print(code_of.value)"]
        printed = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        assert f"value = {printed}" == text


def outcomes(num_found: int, num_survived: int) -> list[Outcome]:
    verdicts = ["found"] * num_found + ["survived"] * num_survived
    return [
        Outcome(f"fault {number}", "a.py", verdict, "", 1.0)
        for number, verdict in enumerate(verdicts)
    ]


def test_the_score() -> None:
    """Tests that took too long, or fail anyway, have found nothing."""
    assert [is_enough(outcomes(*counts)) for counts in ((19, 1), (18, 1), (18, 2))] == [
        True,
        False,
        False,
    ]
    late = [*outcomes(1, 1), Outcome("slow one", "b.py", "took too long", "", 90.0)]
    assert (
        summary(late)
        == "1 of 3 faults found (33.3%)\nsurvived: fault 1 (a.py)\ntook too long: slow one (b.py)"
    )


def test_the_table_counts_by_part() -> None:
    several = [
        Outcome("a", "outrider/kv/a.py", "found", "", 1.0),
        Outcome("b", "outrider/kv/b.py", "survived", "", 1.0),
    ]
    rows = table([*several, Outcome("c", "outrider/rows.py", "found", "", 1.0)]).splitlines()[2:]
    assert rows == ["| `kv/` | 2 | 1 |", "| `rows.py` | 1 | 1 |"]


def test_what_is_stored_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "RESULTS", tmp_path)
    path = store(outcomes(2, 1))
    assert read(path) == outcomes(2, 1)
    head = json.loads(path.read_text())
    assert (head["version"], head["benchmark"], head["command"]) == (
        1,
        "mutants",
        "python -m tools.mutants",
    )


@pytest.mark.parametrize(
    "path", sorted(mutants.RESULTS.glob("mutants-*.json")), ids=lambda path: path.name
)
def test_the_page_has_the_score_of_the_result(path: Path) -> None:
    page = (ROOT / "docs" / "results" / "mutants.md").read_text(encoding="utf-8")
    assert path.name in page
    assert summary(read(path)).splitlines()[0] in page
    assert table(read(path)) in page
