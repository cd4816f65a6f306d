"""The journal: what was added is there after any end, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.lab.journal import Journal

PLAN = {"prompts": 3, "sizes": (1, 2)}


def filled(path: Path) -> Journal:
    journal = Journal.open(path, PLAN, resume=False)
    journal.add("a", {"seconds": 1.5})
    journal.add("b", [1, 2])
    return journal


def test_a_resumed_journal_knows_what_was_done(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    again = Journal.open(tmp_path / "j", PLAN, resume=True)
    assert list(again) == ["a", "b"]
    assert again["a"] == {"seconds": 1.5}
    assert "c" not in again
    again.add("c", None)
    third = Journal.open(tmp_path / "j", PLAN, resume=True)
    assert len(third) == 3
    assert third["c"] is None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_crash_while_writing_costs_the_last_line_only(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Wherever the file ends after its head, whole lines are kept and the next line starts at a
    line's beginning."""
    path = tmp_path / "j"
    filled(path)
    whole = path.read_bytes()
    head = whole.index(b"\n") + 1
    cut = data.draw(st.integers(head, len(whole)))
    path.write_bytes(whole[:cut])
    journal = Journal.open(path, PLAN, resume=True)
    assert list(journal) == ["a", "b"][: whole[head:cut].count(b"\n")]
    journal.add("z", 1)
    assert list(Journal.open(path, PLAN, resume=True)) == [*journal]


def test_another_plan_is_refused_by_name(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    with pytest.raises(ConfigError, match=r"another plan \(prompts, seed\)"):
        Journal.open(tmp_path / "j", {"prompts": 4, "sizes": [1, 2], "seed": 1}, resume=True)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --resume out"):
        Journal.open(tmp_path / "j", PLAN, resume=True)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense\n",
        '{"no plan": 1}\n',
        "[]\n",
        '{"plan": {"prompts": 3, "sizes": [1, 2]}}\nrubbish\n',
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "j").write_text(content)
    with pytest.raises(ConfigError, match="damaged"):
        Journal.open(tmp_path / "j", PLAN, resume=True)


def test_without_resume_it_begins_anew_and_close_removes_it(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    journal = Journal.open(tmp_path / "j", PLAN, resume=False)
    assert len(journal) == 0
    journal.close()
    journal.close()
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize("finished", [0, 1])
def test_a_failure_before_anything_is_finished_leaves_no_file(
    tmp_path: Path, finished: int
) -> None:
    """Else the next run would speak of an interrupted one that there is nothing of."""
    journal = Journal.open(tmp_path / "j", PLAN, resume=False)

    def work() -> None:
        with journal:
            for number in range(finished):
                journal.add(str(number), number)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert (tmp_path / "j").exists() == bool(finished)


def test_the_end_of_the_work_is_not_the_end_of_the_journal(tmp_path: Path) -> None:
    """It stays until the result is safe."""
    with Journal.open(tmp_path / "j", PLAN, resume=False) as journal:
        pass
    assert journal.path.exists()


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal.open(tmp_path / "file" / "j", PLAN, resume=False)
