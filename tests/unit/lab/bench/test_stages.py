"""The rounds, with contenders whose clock is ours: order, repeats, fresh starts, failures, endings,
interruptions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider.configuration import Configuration
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.bench import stages
from outrider.lab.bench.plan import Plan, gather, runnable_cells
from outrider.lab.bench.stages import CellState, Contenders, Rounds, order_of
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.sampling.params import SamplingParams
from tests.unit.lab.bench.fakes import Clock, FakeContender, FakeRunner, fake_tokenizer

FAST = Configuration("draft-model", 3)
LEARNER = Configuration("suffix")


SHORT_RUN = Rounds._short_run


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups take no time and leave no trace in the log."""
    monkeypatch.setattr(Rounds, "_short_run", lambda *arguments: None)


class Setting:
    """A bench of fakes in a folder."""

    def __init__(self, folder: Path, prompts: int = 4, tasks: int = 1, **changes: Any) -> None:
        self.clock = Clock()
        self.plan = Plan(
            (FAST, LEARNER),
            **{
                "sampling": SamplingParams(max_tokens=12),
                "rounds": 2,
                "budget_s": 1e9,
                **changes,
            },
        )
        paces = {"none": 1, FAST.label: 4, LEARNER.label: 2}
        self.runner = FakeRunner(
            {
                one.label: FakeContender(one, self.clock, paces[one.label], 0.01, one == LEARNER)
                for one in self.plan.all_configurations
            }
        )
        requests = [
            WorkloadRequest(f"{task} {n}", prompt=f"{n + 1} {task}", task=f"t{task}")
            for n in range(prompts)
            for task in range(tasks)
        ]
        self.material = gather(Workload("w", tuple(requests)), fake_tokenizer(), self.plan, 64)
        self.path = folder / "journal"
        self.log = self.runner.contenders["none"].log
        for one in self.runner.contenders.values():
            one.log = self.log

    def __getitem__(self, label: str) -> FakeContender:
        return self.runner.contenders[label]

    def rounds(self, *, resume: bool = False) -> Rounds:
        field, _ = Contenders.open(self.runner, self.plan.all_configurations)  # type: ignore[arg-type]
        journal = Journal.open(self.path, self.plan.identity(), resume=resume)
        keys, _ = runnable_cells(self.plan, self.material)
        return Rounds(field, self.plan, self.material, keys, journal)

    def run(self, *, resume: bool = False) -> list[CellState]:
        return self.rounds(resume=resume).run()


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    return using(Setting(tmp_path), monkeypatch)


def using(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(stages.time, "perf_counter", setting.clock)
    return setting


def summary(cells: list[CellState]) -> list[Any]:
    """Everything that a result is made from, without the clock's own reading."""
    kept = [
        [
            (note.configuration, note.prompt, note.round, note.decode_s, note.pairing)
            for note in cell.notes
        ]
        for cell in cells
    ]
    return [*kept, [(cell.rounds, cell.ended_by, cell.failures) for cell in cells]]


def test_every_prompt_goes_through_everybody_before_the_next(setting: Setting) -> None:
    setting.run()
    prompts = [tuple(found[0]) for _, found, _ in setting.log]
    assert len(prompts) == 2 * 4 * 3
    for start in range(0, len(prompts), 3):
        assert len(set(prompts[start : start + 3])) == 1
        assert {label for label, *_ in setting.log[start : start + 3]} == {
            "none",
            FAST.label,
            LEARNER.label,
        }
        assert len({seed for *_, seed in setting.log[start : start + 3]}) == 1
    assert len({seed for *_, seed in setting.log}) == 8, "a prompt's seed is its own in every round"


def test_each_cell_is_warmed_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that learn run on a copy: what they know of the prompts must not count."""
    setting = using(Setting(tmp_path, tasks=2), monkeypatch)
    monkeypatch.setattr(Rounds, "_short_run", SHORT_RUN)
    setting.run()
    assert len(setting.log) == 2 * (1 + 2 * 4) * 3
    assert [label for label, *_ in setting.log[:3]] == ["none", FAST.label, LEARNER.label]
    assert setting.runner.opened.count(LEARNER.label) == 1 + 2 * (1 + 2)


def test_nobody_always_goes_first_or_after_the_same_one() -> None:
    orders = [order_of([0, 1, 2], group, turn) for turn in range(2) for group in range(3)]
    assert {order[0] for order in orders} == {0, 1, 2}
    assert {(a, b) for order in orders for a, b in pairwise(order)} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }


def test_speedups_are_those_of_the_same_tokens(setting: Setting) -> None:
    """One token in 10 ms against four: four times, with 8 of 12 tokens after the first steps of
    both."""
    (cell,) = setting.run()
    pairings = [note.pairing for note in cell.of(1)]
    assert len(pairings) == 8
    assert all(one is not None and one.tokens == 8 for one in pairings)
    assert all(one.plain_s / one.own_s == pytest.approx(4) for one in pairings if one)
    assert all(note.pairing is None for note in cell.of(0))


def test_learners_start_afresh_in_every_round_and_others_do_not(setting: Setting) -> None:
    """Once for the bench; those that learn once more for each of two rounds."""
    setting.run()
    assert {
        label: setting.runner.opened.count(label) for label in ("none", FAST.label, LEARNER.label)
    } == {
        "none": 1,
        FAST.label: 1,
        LEARNER.label: 1 + 2,
    }


def test_disturbed_runs_are_repeated_and_the_calmest_counts(setting: Setting) -> None:
    setting[FAST.label].other_cpu = [0.5, 0.3, 0.4, 0.9]
    setting[LEARNER.label].other_cpu = [0.7]
    (cell,) = setting.run()
    first = cell.of(1)[0]
    assert (first.other_cpu, first.attempts) == (0.3, 4)
    assert [note.attempts for note in cell.of(1)[1:]] == [1] * 7
    assert [(note.other_cpu, note.attempts) for note in cell.of(2)][:2] == [(0.7, 1), (0.0, 1)]


def test_one_that_fails_is_left_out_and_the_others_go_on(setting: Setting) -> None:
    setting[FAST.label].error = CapabilityError("this batch is\n too large")
    (cell,) = setting.run()
    assert cell.failures == {1: "this batch is too large"}
    assert cell.of(1) == []
    assert len(cell.of(2)) == 8
    assert [label for label, *_ in setting.log].count(FAST.label) == 1


def test_plain_decoding_may_not_fail(setting: Setting) -> None:
    setting["none"].error = CapabilityError("no")
    with pytest.raises(CapabilityError, match="no"):
        setting.run()


def test_what_cannot_be_built_is_left_out_unless_nothing_else_is_there(setting: Setting) -> None:
    setting.runner.unbuildable = {FAST.label}
    field, failures = Contenders.open(setting.runner, setting.plan.all_configurations)  # type: ignore[arg-type]
    assert field.numbers == [0, 2]
    assert failures == {1: "draft-model k=3 cannot be built"}
    setting.runner.unbuildable = {FAST.label, LEARNER.label}
    with pytest.raises(CapabilityError, match="draft-model k=3 cannot be built"):
        Contenders.open(setting.runner, setting.plan.all_configurations)  # type: ignore[arg-type]


# ---------------------------------------------------------------- endings


def test_it_ends_with_the_last_round(setting: Setting) -> None:
    setting[FAST.label].stutter = 0.05
    (cell,) = setting.run()
    assert (cell.ended_by, cell.rounds) == ("rounds", 2)


def test_the_budget_is_shared_by_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks of 8 prompts; a prompt takes about half a second with everybody; two seconds are
    for two prompts each."""
    setting = using(Setting(tmp_path, prompts=8, tasks=2, budget_s=2.0), monkeypatch)
    cells = setting.run()
    assert [cell.ended_by for cell in cells] == ["budget", "budget"]
    counts = [len(cell.of(0)) for cell in cells]
    assert max(counts) < 8
    assert abs(counts[0] - counts[1]) <= 1
    assert all(len(cell.of(0)) == len(cell.of(1)) for cell in cells)


def test_however_small_the_budget_every_cell_knows_one_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = using(Setting(tmp_path, tasks=3, budget_s=1e-6), monkeypatch).run()
    assert [len(cell.of(1)) for cell in cells] == [1, 1, 1]


@pytest.mark.parametrize("budget_s", [1e-6, 2.0, 8.0])
def test_a_busy_machine_does_not_outrun_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float
) -> None:
    """Others use 60 % all the time. What is over the budget is one group of each cell, once each."""
    setting = using(
        Setting(tmp_path, prompts=40, tasks=2, budget_s=budget_s, rounds=99), monkeypatch
    )
    for label in ("none", FAST.label, LEARNER.label):
        setting[label].other_cpu = [0.6] * 10_000
    began = setting.clock.now
    cells = setting.run()
    group_s = 0.6
    assert setting.clock.now - began <= budget_s + 2 * group_s
    assert {cell.ended_by for cell in cells} == {"budget"}
    assert all(cell.of(number) for cell in cells for number in range(3))
    assert all(note.other_cpu == 0.6 for cell in cells for note in cell.notes)


def test_opening_what_learns_is_paid_from_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = using(Setting(tmp_path, prompts=8, budget_s=3.0), monkeypatch)
    own_open = FakeRunner.open

    def open_slowly(self: FakeRunner, configuration: Configuration) -> FakeContender:
        setting.clock.now += 2.0
        return own_open(self, configuration)

    rounds = setting.rounds()
    monkeypatch.setattr(FakeRunner, "open", open_slowly)
    (cell,) = rounds.run()
    assert cell.ended_by == "budget"
    assert rounds.spent_s >= 2.0 + 0.5
    assert len(cell.of(0)) < 4


def test_ctrl_c_leaves_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second cell's first group: the first cell is kept and says why it ended, the second
    knows nothing."""
    setting = using(Setting(tmp_path, prompts=4, tasks=2), monkeypatch)
    own_run = FakeContender.run

    def run(self: FakeContender, *arguments: Any, **more: Any) -> Any:
        if len(setting.log) == 4 * 3 + 1:
            raise KeyboardInterrupt
        return own_run(self, *arguments, **more)

    monkeypatch.setattr(FakeContender, "run", run)
    rounds = setting.rounds()
    with pytest.raises(KeyboardInterrupt):
        rounds.run()
    (cell,) = rounds.stopped()
    assert (cell.cell_key.task, cell.ended_by, len(cell.of(1))) == ("t0", "interrupted", 4)


def test_progress_knows_what_bounds_a_round(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages_of_it: list[tuple[str, int, float]] = []
    monkeypatch.setattr(Progress, "stage", lambda self, *stage: stages_of_it.append(stage))
    setting.plan = replace(setting.plan, budget_s=90.0)
    setting.run()
    assert stages_of_it[0] == ("round 1", 12, 90.0)


def test_plain_alone_has_nothing_to_be_uncertain_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = using(Setting(tmp_path), monkeypatch)
    setting.plan = Plan((Configuration(),), sampling=SamplingParams(max_tokens=12), rounds=1)
    (cell,) = setting.run()
    assert (cell.ended_by, cell.rounds) == ("rounds", 1)


# ---------------------------------------------------------------- interruption


@pytest.mark.parametrize("stop_after", [0, 1, 5, 9, 12, 13, 23])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    """Ctrl-C in any run; nothing finished is run again, except to teach those that learn."""
    whole = using(Setting(tmp_path / "whole"), monkeypatch)
    expected = summary(whole.run())
    setting = using(Setting(tmp_path / "cut"), monkeypatch)
    own_run = FakeContender.run

    def run(self: FakeContender, *arguments: Any, **more: Any) -> Any:
        if len(setting.log) == stop_after:
            raise KeyboardInterrupt
        return own_run(self, *arguments, **more)

    monkeypatch.setattr(FakeContender, "run", run)
    with pytest.raises(KeyboardInterrupt):
        setting.run()
    monkeypatch.setattr(FakeContender, "run", own_run)
    done = len(setting.log)
    found = setting.run(resume=True)
    assert summary(found) == expected
    again = setting.log[done:]
    finished = stop_after // 3
    timed = [entry for entry in again if entry[0] == FAST.label]
    assert len(timed) == 8 - finished
    taught = [entry[1] for entry in again if entry[0] == LEARNER.label]
    this_round = finished % 4
    assert len(taught) == 8 - finished + this_round
    assert (
        taught[:this_round]
        == [entry[1] for entry in whole.log if entry[0] == LEARNER.label][
            finished - this_round : finished
        ]
    )


def test_another_plan_cannot_go_on(setting: Setting) -> None:
    setting.run()
    setting.plan = Plan((FAST,), sampling=SamplingParams(max_tokens=12))
    with pytest.raises(ConfigError, match="another plan"):
        setting.run(resume=True)


def test_batches_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = using(Setting(tmp_path, prompts=5, batch_sizes=(2,)), monkeypatch)
    (cell,) = setting.run()
    assert {len(prompts) for _, prompts, _ in setting.log} == {2}
    assert all(note.shared for note in cell.of(0))
    assert (
        len({tuple(map(tuple, prompts)) for label, prompts, _ in setting.log if label == "none"})
        > 2
    ), "the same neighbours"
