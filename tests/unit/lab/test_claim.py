"""A claim keeps other processes away from a run's files, until the run or its process ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.cli.app import run
from outrider.errors import ConfigError
from outrider.lab.journal import claimed

HOLD = """
import sys
from pathlib import Path
from outrider.lab.journal import claimed
with claimed(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process_with(path: Path) -> Iterator[None]:
    """A process that holds a claim until it is killed."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        process.kill()


@pytest.fixture(autouse=True)
def locks_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def test_another_process_is_refused_until_the_first_one_dies(tmp_path: Path) -> None:
    with another_process_with(tmp_path / "out"):
        with (
            pytest.raises(ConfigError, match=r"another run writes .*out"),
            claimed(tmp_path / "out"),
        ):
            pass
        with claimed(tmp_path / "other"):
            pass
    with claimed(tmp_path / "out"):
        pass


def test_a_claim_ends_with_its_block_whatever_happens_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed(tmp_path / "out"):
        raise ZeroDivisionError
    with another_process_with(tmp_path / "out"):
        pass


def test_a_measurement_beside_another_one_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what the other one has found so far stays as it is."""
    (tmp_path / "x.unfinished.jsonl").write_text("found so far\n")
    with another_process_with(tmp_path / "x.unfinished.jsonl"):
        code = run(["bench", "demo", "--prompts", "demo", "--out", str(tmp_path / "x.json")])
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert "another run writes" in said
    assert (tmp_path / "x.unfinished.jsonl").read_text() == "found so far\n"


def test_a_machine_that_keeps_no_locks_works_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    with claimed(tmp_path / "out"):
        pass
