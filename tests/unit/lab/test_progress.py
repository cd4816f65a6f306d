"""Progress without a terminal: seen at once, then at a bounded rate, by a clock of our own."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from outrider.cli.lab import Bar
from outrider.lab import progress
from outrider.lab.progress import Lines


def test_lines_come_at_once_and_then_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of ten minutes whose units take a second each."""
    now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    written: list[tuple[float, str]] = []
    lines = Lines(lambda line: written.append((now - 100, line)))
    lines.stage("round 1", 1200)
    for _ in range(600):
        now += 1
        lines.advance()
    assert written[:3] == [
        (0, "round 1: 0 of 1200"),
        (5, "round 1: 5 of 1200, 0:05 so far, about 19:55 left"),
        (15, "round 1: 15 of 1200, 0:15 so far, about 19:45 left"),
    ]
    assert [at for at, _ in written[3:6]] == [35, 75, 135]
    assert len(written) < 16


def test_no_more_time_is_left_than_the_stage_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten of a hundred units in a minute, of two minutes: not nine minutes left."""
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    written: list[str] = []
    lines = Lines(written.append)
    lines.stage("round 1", 100, 120.0)
    now = 60.0
    lines.advance(10)
    assert written == [
        "round 1: 0 of 100, at most 2:00",
        "round 1: 10 of 100, 1:00 so far, about 1:00 left",
    ]


def test_what_an_earlier_run_finished_tells_nothing_of_the_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a resumed run of an hour that announces a minute."""
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    written: list[str] = []
    lines = Lines(written.append)
    lines.stage("training", 1000)
    lines.skip(400)
    now = 10.0
    lines.advance(5)
    assert written[1:] == ["training: 405 of 1000, 0:10 so far, about 19:50 left"]


def test_a_bar_begins_its_clock_behind_what_is_skipped() -> None:
    """Catches the same on a terminal: rich takes a jump for speed."""
    now = 0.0
    with Bars(
        console=Console(file=io.StringIO()), get_time=lambda: now, auto_refresh=False
    ) as bars:
        bar = Bar(bars)
        bar.stage("training", 1000, 1e6)
        bar.skip(400)
        now = 10.0
        bar.advance(5)
        now = 20.0
        bar.advance(5)
        (task,) = bars.tasks
        assert (task.completed, task.fields["max_s"]) == (410, 1e6)
        assert task.time_remaining == pytest.approx(590 * 10 / 5, rel=0.01)


def test_a_new_stage_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    written: list[str] = []
    lines = Lines(written.append)
    lines.stage("one", 2)
    now = 500.0
    lines.advance(2)
    lines.stage("two", 8)
    lines.advance()
    now = 505.0
    lines.advance()
    assert written == [
        "one: 0 of 2",
        "one: 2 of 2, 8:20 so far, about 0:00 left",
        "two: 0 of 8",
        "two: 2 of 8, 0:05 so far, about 0:15 left",
    ]
