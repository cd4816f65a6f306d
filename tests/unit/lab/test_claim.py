"""A claim keeps other processes away from a run's files, until the run or its process ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.lab.claim import claim
from outrider.lab.journal import Journal

HOLD = """
import sys
from pathlib import Path
from outrider.lab.claim import claim
held = claim(Path(sys.argv[1]))
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
        with pytest.raises(ConfigError, match=r"another run writes .*out"):
            claim(tmp_path / "out")
        claim(tmp_path / "other")()
    claim(tmp_path / "out")()


def test_a_claim_ends_when_it_is_released_or_dropped(tmp_path: Path) -> None:
    claim(tmp_path / "released")()
    claim(tmp_path / "dropped")
    for name in ("released", "dropped"):
        with another_process_with(tmp_path / name):
            pass


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j", {}, resume=False)
    journal.add("a", 1)
    journal.close()
    with another_process_with(tmp_path / "j"), pytest.raises(ConfigError, match="another run writes"):
        Journal.open(tmp_path / "j", {}, resume=False)
    assert not (tmp_path / "j").exists()


def test_a_machine_that_keeps_no_locks_works_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    claim(tmp_path / "out")()
