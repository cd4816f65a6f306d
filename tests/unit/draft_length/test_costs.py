"""Seconds of a step by what it drafts, and by what it asks for."""

from __future__ import annotations

import math
import random

import pytest

from outrider.draft_length.costs import EMPTY_DRAFT, LengthCosts

SIZES = range(9)


def known_costs(slow: float = 1.0) -> LengthCosts:
    """Sizes 0 to 8 in another hour, in which the machine was `slow` times as slow: a node costs 5
    %."""
    costs = LengthCosts(8)
    for size in SIZES:
        costs.observe(size, slow * (1 + 0.05 * size), count=10)
    return costs


def watched(costs: LengthCosts, times: list[tuple[int, float]]) -> LengthCosts:
    """One time a step, after what `costs` knows."""
    for step, (size, seconds) in enumerate(times, 1):
        costs.observe(size, seconds, now=step)
    return costs


def test_sizes_between_and_beyond_follow_those_that_were_timed() -> None:
    costs = watched(LengthCosts(8), [(0, 1.0), (4, 1.4)] * 4)
    assert [costs.drafted()[size] for size in (0, 2, 4, 8)] == pytest.approx(
        [1.0, 1.2, 1.4, 1.8], rel=0.06
    )


def test_a_size_that_was_seen_often_speaks_for_itself() -> None:
    """A step in the cost must not be smoothed away by its neighbours."""
    costs = watched(LengthCosts(8), [(0, 1.0), (4, 1.0), (5, 2.0), (8, 2.0)] * 16)
    assert costs.drafted()[4] < 1.15
    assert costs.drafted()[5] > 1.8


def test_a_plain_step_never_costs_more_than_a_longer_one() -> None:
    """One spoilt plain time would make drafting look good for ever."""
    assert watched(LengthCosts(8), [(0, 5.0), (4, 1.2), (4, 1.2)]).drafted()[0] <= 1.2


def test_slow_minutes_are_slow_for_all_sizes() -> None:
    """Only one size is timed while the machine loses a third of its speed: the others must not look
    cheap for it."""
    costs = watched(
        known_costs(), [(5, 1.25 * (1 + 0.5 * min(step, 30) / 30)) for step in range(60)]
    )
    assert [costs.drafted()[size] for size in (0, 5, 8)] == pytest.approx(
        [1.5, 1.875, 2.1], rel=0.06
    )


def test_times_of_another_hour_tell_how_sizes_compare() -> None:
    """Two times of now, and all sizes are right."""
    costs = known_costs(slow=1.8)
    costs.unsettle()
    watched(costs, [(4, 1.2), (4, 1.2)])
    assert [costs.drafted()[size] for size in (0, 4, 8)] == pytest.approx([1.0, 1.2, 1.4], rel=0.06)


def test_times_of_another_hour_leave_a_doubt_about_nodes() -> None:
    """Memory's speed decides what nodes cost beside a plain step: eight may cost a fifth more now,
    and are soon believed."""
    sure = known_costs()
    doubting = known_costs()
    doubting.unsettle()
    for costs in (sure, doubting):
        watched(costs, [(0, 1.0), (8, 1.7)])
    assert doubting.drafted()[8] > sure.drafted()[8] + 0.05


def test_a_spoilt_time_counts_little_and_a_slower_machine_is_followed() -> None:
    """A time of five times the usual one changes a tenth at most; what goes on is the truth."""
    costs = watched(known_costs(), [(4, 6.0)])
    assert costs.drafted()[4] < 1.1 * 1.2
    watched(costs, [(4, 2.4)] * 30)
    assert [costs.drafted()[size] for size in (0, 4)] == pytest.approx([2.0, 2.4], rel=0.1)


def test_a_median_counts_for_as_many_times_as_it_stands_for() -> None:
    """Catches four steps observed at once that teach as little as one."""
    found = []
    for count in (1, 4):
        costs = known_costs()
        costs.observe(3, 1.4, now=1, count=count)
        found.append(costs.drafted()[3])
    assert 1.15 < found[0] < found[1] < 1.4


def test_one_size_may_have_become_expensive_alone() -> None:
    """Its own times say so, its neighbours' say that they did not."""
    costs = watched(known_costs(), [(8, 1.8), (0, 1.0), (3, 1.15)] * 60)
    assert [costs.drafted()[size] for size in (3, 8)] == pytest.approx([1.15, 1.8], rel=0.04)


@pytest.mark.parametrize("times", [10, 1e3, 1e5])
def test_a_spoilt_first_time_of_all_does_not_spoil_the_other_sizes(times: float) -> None:
    """A program that is built, a laptop that was asleep: the only time there is, and all sizes are
    guessed from it."""
    steady = [(size, 1 + 0.05 * size) for size in [0, 1, 2, 3, 4, 3, 5, 4, 6, 5] * 8]
    costs = watched(LengthCosts(8), [(3, 1.15 * times), *steady])
    assert costs.drafted()[:9] == pytest.approx([1 + 0.05 * size for size in SIZES], rel=0.1)


def test_wider_steps_than_can_be_asked_for_tell_nothing() -> None:
    costs = known_costs()
    before = costs.drafted()
    costs.observe(12, 9.0)
    assert costs.drafted() == before


def test_an_empty_draft_drifts_with_the_machine() -> None:
    # twice as slow as it was
    costs = watched(known_costs(), [(EMPTY_DRAFT, 1.3)] * 8 + [(2, 2.2)] * 60)
    assert 2.0 < costs.drafted()[EMPTY_DRAFT] < 2.8


def test_another_number_of_rows_begins_with_the_same_proportions() -> None:
    """One time of its own, four times as long, and all sizes are right; the first number of rows
    has learned nothing from it."""
    costs = known_costs()
    other = watched(costs.copy(), [(2, 4.4)] * 3)
    assert [other.drafted()[size] for size in (0, 2, 8)] == pytest.approx([4.0, 4.4, 5.6], rel=0.05)
    assert costs.drafted()[0] == pytest.approx(1.0, rel=0.02)


def test_an_ask_costs_what_is_drafted() -> None:
    """Half of the asks bring 2 nodes, half nothing: half the price of two nodes, whether 2 or 8 are
    asked for."""
    costs = watched(known_costs(), [(0, 1.0), (2, 1.4), (EMPTY_DRAFT, 1.0)] * 30)
    costs.observe_offers([(8, 0), (8, 2)] * 50)
    assert [costs.asked()[size] for size in (0, 2, 8)] == pytest.approx([1.0, 1.2, 1.2], abs=0.04)


def test_asking_where_nothing_is_drafted_has_its_own_price() -> None:
    """A model that stops before its first token has run; a plain step has not."""
    costs = watched(known_costs(), [(0, 1.0), (EMPTY_DRAFT, 1.5)] * 20)
    costs.observe_offers([(4, 0)] * 100)
    assert [costs.asked()[size] for size in (0, 4)] == pytest.approx([1.0, 1.5], rel=0.05)


def ratio_error(deviation: float, seeds: int = 8, steps: int = 150) -> float:
    """Root mean square error of the logarithm of how a node compares with a plain step, on a clock
    that errs so much."""
    costs_of = {size: 0.01 * (1 + 0.06 * size) for size in SIZES}
    right = math.log(costs_of[8] / costs_of[0])
    errors = []
    for seed in range(seeds):
        rng = random.Random(seed)
        costs = LengthCosts(8)
        for step in range(steps):
            size = (0, 8, 4, 8)[step % 4]
            costs.observe(size, costs_of[size] * math.exp(rng.gauss(0, deviation)), now=step + 1)
            if step > steps // 3:
                errors.append(math.log(costs.drafted()[8] / costs.drafted()[0]) - right)
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def test_times_beside_a_busy_process_count_for_less() -> None:
    """A filter that takes a noisy clock for an exact one follows the noise: eight nodes look cheap
    now and costly in a moment."""
    assert ratio_error(0.05) < 0.04
    assert ratio_error(0.4) < 0.3


def test_long_texts_make_steps_slow_and_not_the_size_that_is_usual_behind_them() -> None:
    """Short texts draft five, long ones one, in turn: catches a cost of one node that is that of
    long texts. What was never timed behind either is right, too."""

    def step_seconds(size: int, context: int) -> float:
        return 1 + 0.05 * size + context / 10_000 * (1 + 0.2 * size)

    costs = LengthCosts(8)
    rng = random.Random(1)
    for step in range(600):
        context, sizes = ((200, (5, 5, 5, 6, 0)), (6000, (1, 1, 1, 2, 0)))[step // 30 % 2]
        size = sizes[step % 5]
        costs.observe(
            size,
            step_seconds(size, context) * math.exp(rng.gauss(0, 0.03)),
            now=step + 1,
            context=context,
        )
    for context in (200, 6000):
        seconds = costs.drafted(context)
        for size in (1, 3, 5):
            expected = step_seconds(size, context) / step_seconds(0, context)
            assert seconds[size] / seconds[0] == pytest.approx(expected, rel=0.08), (size, context)
    assert costs.drafted(6000)[0] / costs.drafted(200)[0] == pytest.approx(
        step_seconds(0, 6000) / step_seconds(0, 200), rel=0.1
    )
