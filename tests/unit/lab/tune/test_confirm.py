"""Confirming runs and what is made of them, with contenders whose speed we choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.configuration import PLAIN, Configuration
from outrider.errors import CapabilityError
from outrider.lab.journal import Journal
from outrider.lab.result import Interval
from outrider.lab.runner import Step, Trace
from outrider.lab.tune.confirm import Confirmed, confirmation, summarise
from outrider.lab.tune.decide import pays, recommendations
from outrider.lab.tune.forecast import Forecast
from outrider.lab.tune.space import TuneRequest
from outrider.lab.tune.tune import Tuner
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.lab.workload.types import WorkloadRequest
from outrider.outputs import Completion
from outrider.stats import DecodeStats

FAST = Configuration("suffix", 4)
SLOW = Configuration("ngram", 8)
AUTO = Configuration("suffix", "auto")
AUTO_2 = Configuration("ngram", "auto")


class FakeContender:
    """Takes `step_s` a step and keeps `kept` draft tokens each time."""

    def __init__(
        self, configuration: Configuration, step_s: float, kept: int, text: int = 7
    ) -> None:
        self.configuration = configuration
        self.step_s = step_s
        self.kept = kept
        self.text = text
        self.keeps_learning = False
        self.groups = 0

    def run(self, prompts: list[list[int]], params: Any, batch_size: int = 1) -> list[Trace]:
        self.groups += 1
        return [self._trace(number) for number in range(len(prompts))]

    def _trace(self, number: int) -> Trace:
        steps = []
        taken = 1 + self.kept
        clock = 0.0
        for start in range(0, 24, taken):
            clock += self.step_s * (1 + 0.01 * number)
            steps.append(
                Step(
                    start,
                    4,
                    [1] * 4,
                    None,
                    None,
                    [],
                    0,
                    False,
                    min(taken, 24 - start),
                    1,
                    self.step_s,
                    clock,
                )
            )
        stats = DecodeStats(steps=len(steps), emitted=24)
        done = Completion([1], "", [self.text] * 24, "length", [], None, stats, True, 0)
        return Trace(done, steps, 0.0, 0.0)


class FakeRunner:
    """Opens the contenders it has by their labels; `failing` cannot be built."""

    def __init__(self, *contenders: FakeContender, failing: tuple[Configuration, ...] = ()) -> None:
        self.contenders = {one.configuration.label: one for one in contenders}
        self.failing = failing

    def open(self, configuration: Configuration) -> FakeContender:
        if configuration in self.failing:
            raise CapabilityError(f"no {configuration.drafter} here")
        return self.contenders[configuration.label]


def confirmed(
    runner: FakeRunner,
    finalists: list[Configuration],
    prompts: list[PreparedPrompt],
    journal: Journal,
) -> list[Confirmed]:
    rounds, _ = confirmation(runner, finalists, prompts, TuneRequest(), 1e9, journal)  # type: ignore[arg-type]
    rounds.run()
    return summarise(rounds)


def samples(count: int, task: str = "code", first: int = 0) -> list[PreparedPrompt]:
    return [
        PreparedPrompt(WorkloadRequest(f"{task} {n}", task=task), [1], 24, n)
        for n in range(first, first + count)
    ]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(tmp_path / "journal", {}, resume=False)


def test_speedup_is_of_the_decode_phase(journal: Journal) -> None:
    """Three tokens in a step that takes 1.5 times as long: twice as fast, the first step not
    counted."""
    runner = FakeRunner(
        FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.015, 2)
    )
    (found,) = confirmed(runner, [FAST], samples(5), journal)
    assert found.speedup.value == pytest.approx(2.0)
    assert found.speedup.low == pytest.approx(2.0), "all prompts alike"
    assert found.tau == pytest.approx(3.0)
    assert (found.identical, found.texts) == (5, 5)


def test_tasks_count_apart_and_together(journal: Journal) -> None:
    runner = FakeRunner(
        FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.015, 2)
    )
    (found,) = confirmed(runner, [FAST], [*samples(3), *samples(2, "chat", 3)], journal)
    assert set(found.by_task) == {"code", "chat"}
    assert found.texts == 5, "prompts of two tasks are not mixed up"


def test_who_cannot_be_built_is_reported_and_the_others_run(journal: Journal) -> None:
    runner = FakeRunner(
        FakeContender(Configuration(PLAIN), 0.010, 0),
        FakeContender(FAST, 0.010, 3),
        failing=(SLOW,),
    )
    rounds, failures = confirmation(runner, [FAST, SLOW], samples(3), TuneRequest(), 1e9, journal)  # type: ignore[arg-type]
    rounds.run()
    assert [one.configuration for one in summarise(rounds)] == [FAST.label]
    assert failures == {SLOW.label: "no ngram here"}


def test_an_answer_that_the_first_step_says_has_no_speed(journal: Journal) -> None:
    """Short answers, long drafts: nothing is left to time. That is neither a gain without end nor a
    division by zero."""
    runner = FakeRunner(
        FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.010, 23)
    )
    assert confirmed(runner, [FAST], samples(2), journal) == []


def test_different_texts_are_seen(journal: Journal) -> None:
    runner = FakeRunner(
        FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.010, 1, text=8)
    )
    assert confirmed(runner, [FAST], samples(3), journal)[0].identical == 0


@pytest.mark.parametrize(
    ("value", "low", "wanted"),
    [
        (1.5, 1.2, True),
        (1.05, 1.03, True),
        (1.05, 0.97, False),
        (1.15, 0.95, True),
        (1.01, 1.005, False),
        (0.8, 0.7, False),
    ],
)
def test_when_it_pays(value: float, low: float, wanted: bool) -> None:
    assert pays(Interval(value=value, low=low, high=2 * value)) is wanted


def test_advice_for_all_and_for_the_task_that_differs() -> None:
    found = findings(
        {
            FAST.label: (1.6, {"code": 2.0, "chat": 1.3}),
            SLOW.label: (1.5, {"code": 1.2, "chat": 1.8}),
        }
    )
    first, *others = recommendations(found, draft=None)
    assert (first.task, first.configuration, first.speculate) == ("all", FAST.label, True)
    assert first.options == {"drafter": "suffix", "num_draft_tokens": 4, "verifier": "auto"}
    assert [(one.task, one.configuration) for one in others] == [("chat", SLOW.label)]


def test_the_highest_value_is_recommended_not_the_surest_one() -> None:
    """Finalists rank differently by value and by either end of their intervals; also where a task
    has advice of its own."""
    found = findings(
        {
            FAST.label: (1.6, {"code": 1.6, "chat": 1.6}),
            SLOW.label: (1.5, {"code": 1.5, "chat": 1.7}),
        }
    )
    wide, narrow = found.confirmed
    wide.speedup = Interval(value=1.6, low=1.2, high=1.8)
    narrow.speedup = Interval(value=1.5, low=1.4, high=2.0)
    narrow.by_task["chat"] = Interval(value=1.7, low=1.1, high=2.0)
    for order in ([FAST, SLOW], [SLOW, FAST]):
        found.finalists = order
        found.confirmed.reverse()
        first, *others = recommendations(found, draft=None)
        assert (first.configuration, first.speedup) == (FAST.label, wide.speedup)
        assert [(one.task, one.configuration) for one in others] == [("chat", SLOW.label)]


@pytest.mark.parametrize(("value", "named"), [(1.515, []), (1.55, ["chat"])])
def test_a_task_gets_advice_of_its_own_where_that_is_worth_it(
    value: float, named: list[str]
) -> None:
    """Another finalist that is better for it by less than 2 % is no reason for other settings."""
    found = findings(
        {
            FAST.label: (1.6, {"code": 1.6, "chat": 1.5}),
            SLOW.label: (1.4, {"code": 1.2, "chat": value}),
        }
    )
    _, *others = recommendations(found, draft=None)
    assert [one.task for one in others] == named


def test_automatic_lengths_win_by_far_or_not_at_all() -> None:
    """By 5 % of the best fixed length, which need not be the second best of all."""
    for value, best in ((1.57, SLOW), (1.58, AUTO)):
        found = findings(
            {
                AUTO.label: (value, {}),
                AUTO_2.label: (1.55, {}),
                SLOW.label: (1.5, {}),
                FAST.label: (1.4, {}),
            }
        )
        (first,) = recommendations(found, draft=None)
        assert first.configuration == best.label


def test_a_task_that_no_run_came_to_gets_no_advice_of_its_own() -> None:
    """The time limit, or Ctrl-C, ended confirming before: to say 'do not speculate' of it would be
    made up."""
    found = findings({FAST.label: (1.6, {"code": 1.6})})
    found.shares = {"code": 0.5, "chat": 0.5}
    assert [one.task for one in recommendations(found, draft=None)] == ["all"]


def test_tasks_take_turns(journal: Journal) -> None:
    """Whenever the time is over, each has had about as many prompts as another; results know
    prompts by their old numbers."""
    runner = FakeRunner(
        FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.015, 2)
    )
    prompts = [*samples(3), *samples(2, "chat", 3)]
    rounds, _ = confirmation(runner, [FAST], prompts, TuneRequest(), 1e9, journal)  # type: ignore[arg-type]
    assert [one.number for one in rounds.cells[0].prompts] == [0, 3, 1, 4, 2]


def test_do_not_speculate() -> None:
    """The best of bad choices is no advice; a task for which it pays is named all the same."""
    found = findings({FAST.label: (0.9, {"code": 0.7, "chat": 1.4})})
    first, *others = recommendations(found, draft=None)
    assert (first.speculate, first.configuration, first.options) == (
        False,
        "none",
        {"drafter": "none"},
    )
    assert FAST.label in first.reason
    assert [(one.task, one.configuration) for one in others] == [("chat", FAST.label)]


@pytest.mark.parametrize(("value", "speculate"), [(1.6, True), (0.9, False)])
def test_a_gain_without_an_interval_is_stated_alone(value: float, speculate: bool) -> None:
    """A single batch of prompts has no interval; its open ends are no numbers to show."""
    found = findings({FAST.label: (value, {})})
    found.confirmed[0].speedup = Interval.unknown(value)
    (first,) = recommendations(found, draft=None)
    assert first.speculate is speculate
    assert first.reason.endswith(
        f"{FAST.label}{' reaches' if speculate else ', reaches'} {value:.2f}x plain decoding"
    )


def test_a_forecast_alone_recommends_nothing() -> None:
    (first,) = recommendations(findings({}), draft=None)
    assert not first.speculate
    assert "confirmed" in first.reason


def findings(speedups: dict[str, tuple[float, dict[str, float]]]) -> Tuner:
    tasks = {task for _, by_task in speedups.values() for task in by_task}
    nobody: Any = None
    tuner = Tuner(nobody, [], TuneRequest(), [], [], Journal())
    tuner.shares = dict.fromkeys(sorted(tasks), 1 / max(len(tasks), 1))
    tuner.finalists = [Configuration.parse(label) for label in speedups]
    tuner.forecasts = [
        Forecast(
            family="x",
            configuration=one,
            size=4,
            task="code",
            tau=2,
            step_s=1,
            tokens_per_s=1,
            speedup=2,
            break_even_alpha=None,
        )
        for one in speedups
    ]
    tuner.confirmed = [
        Confirmed(
            configuration=one,
            speedup=_interval(value),
            by_task={t: _interval(v) for t, v in by_task.items()},
            tokens_per_s=1,
            tau=1,
            identical=1,
            texts=1,
        )
        for one, (value, by_task) in speedups.items()
    ]
    return tuner


def _interval(value: float) -> Interval:
    return Interval(value=value, low=0.95 * value, high=1.05 * value)
