"""Repeating disturbed runs: by a clock and shares of our own, bounded in number, in time and by
success."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from outrider.lab import disturbance
from outrider.lab.disturbance import GIVE_UP, SILENCE_S, Repeats


@dataclass
class Machine:
    """Runs take ten seconds each; `shares` are what others use during the next ones, the last one
    for ever."""

    shares: list[float]
    now: float = 0.0
    runs: int = 0
    notes: list[str] = field(default_factory=list)

    def run(self) -> float:
        self.now += 10.0
        self.runs += 1
        return self.shares.pop(0) if len(self.shares) > 1 else self.shares[0]

    def take(self, repeats: Repeats, limit: int = 3) -> tuple[float, int]:
        return repeats.calmest(self.run, lambda share: share, limit)


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def make(*shares: float) -> Machine:
        machine = Machine(list(shares))
        monkeypatch.setattr(disturbance.time, "perf_counter", lambda: machine.now)
        return machine

    return make


def test_a_disturbed_run_is_repeated_until_one_is_calm(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(0.5, 0.4, 0.05, 0.0)
    assert machine.take(Repeats(0.1)) == (0.05, 3)


def test_the_calmest_of_all_attempts_counts(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(0.5, 0.3, 0.4, 0.9, 0.0)
    assert machine.take(Repeats(0.1)) == (0.3, 4)


def test_what_may_not_run_twice_runs_once(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(0.9)
    repeats = Repeats(0.1, machine.notes.append)
    assert [machine.take(repeats, limit=0) for _ in range(9)] == [(0.9, 1)] * 9
    assert machine.notes == []


def test_nothing_is_repeated_when_the_time_is_up(machine_of: Callable[..., Machine]) -> None:
    """The clock is read after each attempt: the one that runs at the deadline is the last."""
    machine = machine_of(0.9)
    repeats = Repeats(0.1, deadline_s=15.0)
    assert machine.take(repeats) == (0.9, 2)
    assert machine.take(repeats) == (0.9, 1)


def test_repeating_that_does_not_help_ends(machine_of: Callable[..., Machine]) -> None:
    """Two busy loops beside us for an hour: the hundred runs must not become four hundred."""
    machine = machine_of(0.6)
    repeats = Repeats(0.1)
    attempts = [machine.take(repeats)[1] for _ in range(100)]
    assert attempts == [4] * GIVE_UP + [1] * (100 - GIVE_UP)


def test_a_calm_run_makes_repeating_worth_it_again(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(*[0.6] * (4 * GIVE_UP + 1), 0.0, 0.6)
    repeats = Repeats(0.1)
    for _ in range(GIVE_UP + 1):
        machine.take(repeats)
    assert machine.take(repeats) == (0.0, 1)
    assert machine.take(repeats) == (0.6, 4)


def test_the_user_gets_a_note_at_once_and_then_seldom(machine_of: Callable[..., Machine]) -> None:
    """How much others use and what is done about it, at a bounded rate."""
    machine = machine_of(0.6)
    repeats = Repeats(0.1, machine.notes.append)
    machine.take(repeats, limit=1)
    assert machine.notes == [
        "other processes use 60% of the processors: disturbed runs are repeated"
    ]
    for _ in range(50):
        machine.take(repeats, limit=1)
    assert len(machine.notes) <= 1 + machine.now / SILENCE_S
    assert machine.notes[-1] == (
        "other processes use 60% of the processors: repeating runs has not helped, so they count as they are and are called "
        "disturbed"
    )
