"""From notes of steps to forecasts: numbers that can be checked by hand, and drafts whose
distribution is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider.configuration import PLAIN, Configuration
from outrider.lab.journal import Journal
from outrider.lab.tune.families import default_space
from outrider.lab.tune.forecast import best_at, forecast, overall, plain_tokens_per_s, step_costs
from outrider.lab.tune.probe import (
    Probe,
    StepNote,
    conditional_acceptance,
    mean_kept,
    offered_widths,
    run_probe,
    survival,
    sweep_order,
)
from outrider.lab.tune.space import PLAIN_FAMILY, Family, TuneRequest
from outrider.lab.tune.tune import Tuner
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.lab.workload.types import WorkloadRequest
from tools.tune_simulation.simulate import World

CHAIN = Family(Configuration("draft-model"), (1, 2, 4), nested=True)
TREE = Family(Configuration("recycling"), (7, 15), nested=False)


def note(
    asked: int, kept: int, drafted: int | None = None, seconds: float = 0.01, *, steady: bool = True
) -> StepNote:
    return StepNote(
        asked=asked,
        drafted=asked if drafted is None else drafted,
        kept=kept,
        seconds=seconds,
        steady=steady,
    )


def probe(steps: list[StepNote], task: str = "code", family: Family = CHAIN) -> Probe:
    return Probe(family=family.label, steps={task: steps}, num_prompts=1, tokens=1, seconds=1.0)


def chain_steps(
    acceptance: float, count: int, *, offers: float = 1.0, seed: int = 0
) -> list[StepNote]:
    """Steps of a drafter whose every token is kept with `acceptance`, and that continues offering
    with `offers`."""
    dice = random.Random(seed)
    steps = []
    for number in range(count):
        asked = (1, 2, 4)[number % 3]
        drafted = next((n for n in range(asked) if dice.random() >= offers), asked)
        kept = next((n for n in range(drafted) if dice.random() >= acceptance), drafted)
        steps.append(note(asked, kept, drafted, seconds=0.010 + 0.002 * drafted))
    return steps


def test_survival_is_the_distribution_of_the_drafter() -> None:
    """Steps that asked for less must not count as failures at the depths they never tried."""
    curve = survival(chain_steps(0.8, 6000), 4)
    assert curve == pytest.approx([0.8, 0.64, 0.512, 0.41], abs=0.03)


def test_where_no_plain_step_was_timed_nothing_pays() -> None:
    """Answers of one word: every step is one of a run's first ones."""
    short = probe([note(0, 0, steady=False)], family=PLAIN_FAMILY)
    timed = probe(chain_steps(0.8, 30))
    assert plain_tokens_per_s(short, 4) == 0
    for families in ([], [(CHAIN, timed, {})], [(CHAIN, timed, {4: 0.01})]):
        found = best_at(4, families, {"code": 1.0})
        assert (found.configuration, found.size, found.speedup) == ("none", 0, 1.0)


def test_a_drafter_that_offers_less_keeps_less() -> None:
    """An empty offer is a token that was not kept, not a step that says nothing."""
    steps = chain_steps(0.8, 6000, offers=0.5)
    assert conditional_acceptance(steps, 3) == pytest.approx([0.4, 0.4, 0.4], abs=0.03)
    widths = offered_widths(steps, 4, nested=True)
    assert sum(widths) / len(widths) == pytest.approx(0.94, abs=0.05)


def test_a_longer_draft_tells_about_shorter_ones() -> None:
    """Three of eight kept: asked for two, both would have been."""
    steps = [note(8, 3)] * 10
    assert mean_kept(steps, 2, nested=True) == pytest.approx(2.0, abs=0.1)
    assert mean_kept(steps, 4, nested=True) == pytest.approx(3.0, abs=0.15)
    assert offered_widths(steps, 2, nested=True) == [2] * 10


def test_trees_tell_about_their_own_size_only() -> None:
    steps = [note(7, 2), note(7, 3), note(15, 4)]
    assert mean_kept(steps, 7, nested=False) == 2.5
    assert mean_kept(steps, 15, nested=False) == 4
    assert mean_kept(steps, 31, nested=False) is None


def test_costs_leave_first_steps_out() -> None:
    """The first steps of a run touch new memory."""
    costs = step_costs(
        probe(
            [
                note(0, 0, seconds=0.010),
                note(2, 1, seconds=0.014),
                note(2, 1, seconds=9.0, steady=False),
            ]
        )
    )
    assert costs is not None
    assert costs.step_s(0)[0] == 0.010
    assert costs.step_s(2)[0] == 0.014
    assert step_costs(probe([note(2, 1, steady=False)])) is None


def test_a_forecast_by_hand() -> None:
    """Everything kept: k = 4 brings five tokens for 18 ms instead of one for 10 ms."""
    steps = [*[note(0, 0, seconds=0.010)] * 5, *[note(4, 4, seconds=0.018)] * 50]
    found = {
        one.size: one
        for one in forecast(CHAIN, probe(steps), _costs(steps), plain_tokens_per_s=200.0)
    }
    assert found[4].tau == pytest.approx(5.0, abs=0.05)
    assert found[4].speedup == pytest.approx(5.0 * 10 / 18, rel=0.01)
    assert found[4].tokens_per_s == pytest.approx(200 * found[4].speedup)
    assert found[2].step_s == pytest.approx(0.014), (
        "between the sizes that were timed: a straight line"
    )


def test_the_baseline_comes_from_the_same_probe() -> None:
    """A machine that was twice as slow during this probe slows both sides of the ratio."""
    steps = [note(0, 0, seconds=0.010), note(4, 2, seconds=0.015)] * 20
    slow = [one.model_copy(update={"seconds": 2 * one.seconds}) for one in steps]
    usual, late = (
        forecast(CHAIN, probe(s), _costs(s), plain_tokens_per_s=100.0) for s in (steps, slow)
    )
    assert [one.speedup for one in usual] == pytest.approx([one.speedup for one in late])


def test_overall_weighs_tasks_by_their_tokens() -> None:
    """Half of the tokens at 4x, half at 1x: time is 1/8 + 1/2 of plain decoding's."""
    steps = [note(4, 3, seconds=0.010)] * 40
    costs = _costs([note(0, 0, seconds=0.010), *steps])
    fast = forecast(CHAIN, probe(steps, "code"), costs, 100.0)
    slow = forecast(CHAIN, probe([note(4, 0, seconds=0.010)] * 40, "chat"), costs, 100.0)
    found = overall([*fast, *slow], {"code": 0.5, "chat": 0.5})
    label = CHAIN.member(4).label
    assert found[label] == pytest.approx(1 / (0.5 / 4 + 0.5), rel=0.02)
    assert overall(fast, {"code": 0.5, "chat": 0.5}) == {}, "not forecast for chat"


def test_load_falls_back_to_plain_decoding() -> None:
    """The same acceptance pays where a wide step costs little, and does not where it costs its
    width."""
    steps = chain_steps(0.7, 300)
    idle = {size: 0.010 + 0.001 * size for size in (0, 1, 2, 4)}
    busy = {size: 0.010 * (1 + size) for size in (0, 1, 2, 4)}
    assert best_at(1, [(CHAIN, probe(steps), idle)], {"code": 1.0}).size == 4
    found = best_at(32, [(CHAIN, probe(steps), busy)], {"code": 1.0})
    assert (found.configuration, found.size, found.speedup) == ("none", 0, 1.0)
    assert found.tokens_per_s == found.plain_tokens_per_s == pytest.approx(32 / 0.010)


def test_trying_everything_takes_the_time_to_read_prompts_too() -> None:
    """Catches a time limit that long prompts with short answers use up before the second one."""
    steps = {"code": [note(0, 0, seconds=0.010)] * 5}
    # 2 s of reading
    plain = Probe(family=PLAIN_FAMILY.label, steps=steps, num_prompts=2, tokens=100, seconds=3.0)
    samples = [PreparedPrompt(WorkloadRequest(str(n), task="code"), [n], 50, n) for n in range(4)]
    nobody: Any = None
    tuner = Tuner(nobody, [], TuneRequest(), samples[:1], samples[1:], Journal())
    tuner.plain = plain
    tuner.overall = {CHAIN.member(4).label: 2.0}
    assert tuner.seconds([PLAIN, CHAIN.member(4).label], samples) == pytest.approx(
        200 * 0.010 * (1 + 1 / 2) + 2 * 4 * 1.0
    )


def test_a_sweep_visits_every_size_and_the_longest_most() -> None:
    order = sweep_order(CHAIN)
    assert set(order) == {0, 1, 2, 4}
    assert order.count(4) == 3
    assert sweep_order(TREE) == [0, 7, 15]


def rehearsed() -> tuple[World, Family]:
    space = default_space(TuneRequest(has_draft=True, own_weights=False))
    return World(0, space), next(family for family in space if family.label == "draft-model")


def some(count: int, task: str) -> list[PreparedPrompt]:
    return [
        PreparedPrompt(WorkloadRequest(f"{task} {n}", task=task), [n], 24, n) for n in range(count)
    ]


def test_a_hopeless_family_is_only_glanced_at() -> None:
    """One prompt of each task is enough to see that 3 % of plain decoding's speed will not become
    the best."""
    world, family = rehearsed()
    samples = [*some(3, "code"), *some(2, "chat")]
    seen: list[Probe] = []
    glance = run_probe(
        world.open(family.largest),
        family,
        samples,
        TuneRequest(),
        is_enough=lambda found: not seen.append(found.model_copy()),
    )
    assert seen == [glance]
    assert glance.tokens == 2 * 24
    assert set(glance.steps) == {"code", "chat"}


def test_a_family_may_be_left_after_any_round() -> None:
    """So a time limit is overrun by one prompt of each task at most."""
    world, family = rehearsed()
    samples = [*some(3, "code"), *some(2, "chat")]
    probe = run_probe(
        world.open(family.largest),
        family,
        samples,
        TuneRequest(),
        is_enough=lambda found: found.tokens > 2 * 24,
    )
    assert probe.tokens == 4 * 24


def test_a_hopeful_family_is_probed_to_the_end() -> None:
    world, family = rehearsed()
    samples = [*some(3, "code"), *some(2, "chat")]
    probe = run_probe(
        world.open(family.largest), family, samples, TuneRequest(), is_enough=lambda found: False
    )
    assert probe.tokens == 5 * 24
    assert probe.num_prompts == 5


def test_batches_are_never_glanced_at() -> None:
    """A batch of the first prompts alone would be smaller than the others, and cost otherwise."""
    world, family = rehearsed()
    probe = run_probe(
        world.open(family.largest),
        family,
        some(3, "code"),
        TuneRequest(batch_size=2),
        is_enough=lambda found: True,
    )
    assert probe.tokens == 3 * 24


def _costs(steps: list[StepNote]):  # noqa: ANN202
    costs = step_costs(probe(steps))
    assert costs is not None
    return costs
