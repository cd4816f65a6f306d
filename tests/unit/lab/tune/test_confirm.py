"""The race and what is made of it, with runs whose speed we choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CapabilityError
from outrider.lab.configuration import PLAIN, Configuration
from outrider.lab.journal import Journal
from outrider.lab.progress import Quiet
from outrider.lab.recording import Step
from outrider.lab.result import Interval
from outrider.lab.runner import Trace
from outrider.lab.tune.beliefs import Member
from outrider.lab.tune.confirm import Confirmed, Lap, decode_phase, summarise
from outrider.lab.tune.decide import pays, recommendations
from outrider.lab.tune.forecast import Forecast
from outrider.lab.tune.probe import Probe, Sample
from outrider.lab.tune.race import LEAST_GROUPS, Race, Rules
from outrider.lab.tune.tune import Findings, _grouped
from outrider.outputs import Completion
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats

FAST, SLOW = Configuration("suffix", 4), Configuration("ngram", 8)


class FakeContender:
    """Takes `step_s` a step and keeps `kept` draft tokens each time."""

    def __init__(self, configuration: Configuration, step_s: float, kept: int, text: int = 7) -> None:
        self.configuration, self.step_s, self.kept, self.text = configuration, step_s, kept, text
        self.keeps_learning = False
        self.groups = 0

    def run(self, prompts: list[list[int]], params: Any, batch_size: int = 1) -> list[Trace]:
        self.groups += 1
        return [self._trace(number) for number in range(len(prompts))]

    def _trace(self, number: int) -> Trace:
        steps, taken, clock = [], 1 + self.kept, 0.0
        for start in range(0, 24, taken):
            clock += self.step_s * (1 + 0.01 * number)
            steps.append(Step(start, 4, [1] * 4, None, None, [], 0, False, min(taken, 24 - start), 1, self.step_s, clock))
        done = Completion([1], "", [self.text] * 24, "length", [], None, DecodeStats(), True, 0)
        return Trace(done, steps, 0.0, 0.0)


def race(plain: FakeContender, finalists: list[FakeContender], groups: Any, journal: Journal, budget_s: float = 1e9) -> list[Lap]:
    """Nothing is known beforehand but that all are as fast as plain decoding."""
    by_label = {one.configuration.label: one for one in (plain, *finalists)}
    members = [
        Member(label, None if one is plain else label, 1.0, 0.3) for label, one in by_label.items()
    ]
    return Race(members, by_label.__getitem__, groups, 1, journal, Quiet(), Rules(budget_s=budget_s)).run()  # type: ignore[arg-type]


def samples(count: int, task: str = "code") -> list[Sample]:
    return [Sample(f"{task} {n}", task, [1], SamplingParams()) for n in range(count)]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(tmp_path / "journal", {}, resume=False)


def test_speedup_is_of_the_decode_phase(journal: Journal) -> None:
    """Three tokens in a step that takes 1.5 times as long: twice as fast, the first step not counted."""
    plain, fast = FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.015, 2)
    laps = race(plain, [fast], [[one] for one in samples(5)], journal)
    (found,) = summarise(laps, plain.configuration, greedy=True)
    assert found.speedup.value == pytest.approx(2.0)
    assert found.speedup.low == pytest.approx(2.0), "all prompts alike"
    assert found.tau == pytest.approx(3.0)
    assert (found.identical, found.texts, found.groups) == (5, 5, 5)


def test_a_slower_one_retires(journal: Journal) -> None:
    """Guards against spending half of the time on what has lost; plain decoding leaves, too, when enough is known."""
    plain = FakeContender(Configuration(PLAIN), 0.010, 0)
    fast, slow = FakeContender(FAST, 0.010, 3), FakeContender(SLOW, 0.030, 1)
    laps = race(plain, [fast, slow], [[one] for one in samples(30)], journal)
    assert slow.groups < fast.groups
    assert fast.groups < 30, "it ends when the choice is certain"
    (found, *_) = sorted(summarise(laps, plain.configuration, greedy=True), key=lambda one: -one.speedup.value)
    assert found.configuration == FAST.label


def test_a_spent_budget_ends_it_but_not_before_enough_was_run(journal: Journal) -> None:
    plain, fast = FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.0099, 0)
    race(plain, [fast], [[one] for one in samples(30)], journal, budget_s=0.0)
    assert plain.groups == fast.groups == LEAST_GROUPS


def test_who_cannot_be_built_is_told_and_the_others_race(journal: Journal) -> None:
    plain, fast = FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.010, 3)

    def open_one(label: str) -> FakeContender:
        if label == SLOW.label:
            raise CapabilityError("no")
        return {PLAIN: plain, FAST.label: fast}[label]

    members = [Member(PLAIN, None, 1.0, 0.0), Member(FAST.label, "a", 1.5, 0.1), Member(SLOW.label, "b", 1.5, 0.1)]
    one = Race(members, open_one, [[s] for s in samples(8)], 1, journal, Quiet(), Rules())  # type: ignore[arg-type]
    assert {lap.configuration for lap in one.run()} == {PLAIN, FAST.label}
    assert one.failures == {SLOW.label: "no"}


def test_nobody_but_plain_decoding_can_be_built(journal: Journal) -> None:
    """A head whose folder is gone when an interrupted tuning goes on: every member fails, each is told, nothing is raised."""
    plain = FakeContender(Configuration(PLAIN), 0.010, 0)

    def open_one(label: str) -> FakeContender:
        if label != PLAIN:
            raise CapabilityError("no such folder")
        return plain

    members = [Member(PLAIN, None, 1.0, 0.0), Member(FAST.label, "a", 1.5, 0.1), Member(SLOW.label, "b", 1.5, 0.1)]
    one = Race(members, open_one, [[s] for s in samples(12)], 1, journal, Quiet(), Rules())  # type: ignore[arg-type]
    assert summarise(one.run(), Configuration(PLAIN), greedy=True) == []
    assert one.failures == dict.fromkeys((FAST.label, SLOW.label), "no such folder")


def lap(configuration: str, group: int, seconds: float, tokens: int) -> Lap:
    return Lap(
        configuration=configuration, group=group, task="code", seconds=seconds, tokens=tokens, steps=tokens, texts=["a"],
        other_cpu=0.0,
    )  # fmt: skip


def test_an_answer_that_the_first_step_says_has_no_speed() -> None:
    """Short answers, long drafts: nothing is left to time. That is neither a gain without end nor a division by zero."""
    plain, fast = [lap(PLAIN, group, 0.23, 23) for group in range(2)], [lap(FAST.label, 0, 0.046, 23), lap(FAST.label, 1, 0.0, 0)]
    (found,) = summarise([*plain, *fast], Configuration(PLAIN), greedy=True)
    assert found.speedup.value == pytest.approx(5.0)
    assert summarise([*plain, *[lap(FAST.label, group, 0.0, 0) for group in range(2)]], Configuration(PLAIN), greedy=True) == []


def test_different_texts_are_seen(journal: Journal) -> None:
    plain, other = FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.010, 1, text=8)
    laps = race(plain, [other], [[one] for one in samples(3)], journal)
    assert summarise(laps, plain.configuration, greedy=True)[0].identical == 0
    assert summarise(laps, plain.configuration, greedy=False)[0].identical is None


def test_a_resumed_race_runs_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    plain, fast = FakeContender(Configuration(PLAIN), 0.010, 0), FakeContender(FAST, 0.010, 1)
    groups = [[one] for one in samples(4)]
    before = race(plain, [fast], groups[:3], Journal.open(path, {}, resume=False))
    after = race(plain, [fast], groups, Journal.open(path, {}, resume=True))
    assert plain.groups == 4
    assert sorted(lap.model_dump_json() for lap in before) == sorted(lap.model_dump_json() for lap in after if lap.group < 3)


def test_a_shared_step_is_paid_once() -> None:
    """Rows of one batch share the clock, not the tokens."""
    traces = FakeContender(FAST, 0.010, 1).run([[1], [1]], None)
    same_clock = [Trace(one.completion, traces[0].steps, 0.0, 0.0) for one in traces]
    seconds, tokens = decode_phase(same_clock)
    assert seconds == pytest.approx(0.110)
    assert tokens == 44


def test_groups_hold_one_task_and_take_turns() -> None:
    groups = list(_grouped([*samples(3, "code"), *samples(2, "chat")], 2))
    assert [[one.id for one in group] for group in groups] == [["code 0", "code 1"], ["chat 0", "chat 1"], ["code 2"]]


@pytest.mark.parametrize(
    ("value", "low", "wanted"),
    [(1.5, 1.2, True), (1.05, 1.03, True), (1.05, 0.97, False), (1.15, 0.95, True), (1.01, 1.005, False), (0.8, 0.7, False)],
)
def test_when_it_pays(value: float, low: float, wanted: bool) -> None:
    assert pays(Interval(value=value, low=low, high=2 * value)) is wanted


def test_advice_for_all_and_for_the_task_that_differs() -> None:
    found = findings({FAST.label: (1.6, {"code": 2.0, "chat": 1.3}), SLOW.label: (1.5, {"code": 1.2, "chat": 1.8})})
    first, *others = recommendations(found, [FAST, SLOW], draft=None)
    assert (first.task, first.configuration, first.speculate) == ("all", FAST.label, True)
    assert first.options == {"drafter": "suffix", "num_draft_tokens": 4, "verifier": "auto"}
    assert [(one.task, one.configuration) for one in others] == [("chat", SLOW.label)]


def test_do_not_speculate() -> None:
    """The best of bad choices is no advice; a task for which it pays is named all the same."""
    found = findings({FAST.label: (0.9, {"code": 0.7, "chat": 1.4})})
    first, *others = recommendations(found, [FAST], draft=None)
    assert (first.speculate, first.configuration, first.options) == (False, "none", {"drafter": "none"})
    assert FAST.label in first.reason
    assert [(one.task, one.configuration) for one in others] == [("chat", FAST.label)]


def test_a_forecast_alone_recommends_nothing() -> None:
    (first,) = recommendations(findings({}), [], draft=None)
    assert not first.speculate
    assert "confirmed" in first.reason


def findings(speedups: dict[str, tuple[float, dict[str, float]]]) -> Findings:
    probe = Probe(family="none", steps={}, tokens=0, seconds=0.0)
    tasks = {task for _, by_task in speedups.values() for task in by_task}
    return Findings(
        plain=probe,
        shares=dict.fromkeys(sorted(tasks), 1 / max(len(tasks), 1)),
        forecasts=[
            Forecast(
                family="x", configuration=one, size=4, task="code", tau=2, step_s=1, tokens_per_s=1, speedup=2,
                break_even_alpha=None,
            )
            for one in speedups
        ],
        confirmed=[
            Confirmed(
                configuration=one, speedup=_interval(value), by_task={t: _interval(v) for t, v in by_task.items()},
                tokens_per_s=1, tau=1, groups=1, identical=1, texts=1,
            )
            for one, (value, by_task) in speedups.items()
        ],
    )  # fmt: skip


def _interval(value: float) -> Interval:
    return Interval(value=value, low=0.95 * value, high=1.05 * value)
