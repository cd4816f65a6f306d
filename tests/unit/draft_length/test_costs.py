"""Seconds of a step by what it drafts, and by what it asks for."""

from __future__ import annotations

import pytest

from outrider.draft_length.costs import LATEST, VAIN, CostCurve, Slope
from outrider.draft_length.offers import Offers
from outrider.draft_length.probing import GrowthChecks, PlainChecks, Surprise, Tries


def curve_of(**seconds: list[float]) -> CostCurve:
    curve = CostCurve()
    for size, values in seconds.items():
        for value in values:
            curve.observe(int(size[1:]), value)
    return curve


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert CostCurve().seconds(3) is None
    assert CostCurve().known() == {}


def test_a_line_through_what_was_measured() -> None:
    """Between and beyond the sizes that were seen."""
    curve = curve_of(n0=[1.0], n4=[1.4])
    assert [curve.seconds(n) for n in (0, 2, 4, 8)] == pytest.approx([1.0, 1.2, 1.4, 1.8])


def test_one_size_says_nothing_about_others() -> None:
    assert curve_of(n4=[2.0]).seconds(8) == 2.0


def test_a_size_that_was_seen_often_speaks_for_itself() -> None:
    """A step in the cost must not be smoothed away by the line."""
    curve = curve_of(n0=[1.0] * 8, n4=[1.0] * 8, n5=[2.0] * 8, n8=[2.0] * 8)
    assert curve.seconds(4) < 1.15
    assert curve.seconds(5) > 1.8


def test_outliers_do_not_count() -> None:
    curve = curve_of(n4=[1.0, 1.1, 5.0, 0.9, 1.0, 9.0])
    assert curve.known()[4] == pytest.approx(1.0)


def test_a_machine_that_slows_down_is_followed() -> None:
    """What looks like an outlier and stays is the new truth."""
    curve = curve_of(n4=[1.0] * LATEST)
    for _ in range(LATEST):
        curve.observe(4, 3.0)
    assert curve.known()[4] == pytest.approx(3.0)


def test_a_plain_step_never_costs_more_than_a_longer_one() -> None:
    """One spoilt plain time would make drafting look good for ever."""
    assert curve_of(n0=[5.0], n4=[1.2, 1.2]).seconds(0) <= 1.2


# ------------------------------------------------ what is known of a machine


def told(slow: float = 1.0) -> CostCurve:
    """Sizes 0 to 8 in another hour, in which the machine was `slow` times as slow: a node costs 5 %."""
    curve = CostCurve(8, Slope(0.05, 0.2))
    for _ in range(3):
        for size in range(9):
            curve.observe(size, slow * (1 + 0.05 * size))
    return curve


def test_slow_minutes_are_slow_for_all_sizes() -> None:
    """Only one size is timed while the machine loses a third of its speed: the others must not look cheap for it."""
    curve = told()
    for step in range(60):
        curve.observe(5, 1.25 * (1 + 0.5 * min(step, 30) / 30))
    assert curve.seconds(5) == pytest.approx(1.875, rel=0.03)
    assert curve.seconds(0) == pytest.approx(1.5, rel=0.06)
    assert curve.seconds(8) == pytest.approx(2.1, rel=0.03)


def test_times_of_another_hour_tell_how_sizes_compare() -> None:
    """One time of now, and all sizes are right; not a time that does not count because it is so far off."""
    curve = told(slow=1.8)
    curve.unsettle()
    curve.observe(4, 1.2)
    assert [curve.seconds(size) for size in (0, 4, 8)] == pytest.approx([1.0, 1.2, 1.4], rel=0.06)


def test_times_of_another_hour_leave_a_doubt_about_nodes() -> None:
    """Memory's speed decides what nodes cost beside a plain step: in another hour 8 of them may have cost a sixth more."""
    curve = told()
    before = curve.doubts_of([1, 8])
    curve.unsettle()
    one, eight = (after - then for after, then in zip(curve.doubts_of([1, 8]), before, strict=True))
    assert 0.05 < eight**0.5 < 0.2
    assert one < eight / 30


def test_outliers_that_go_on_are_the_truth() -> None:
    """Two spoilt times change nothing; a machine that has become half as fast is believed after a few."""
    curve = told()
    before = curve.seconds(4)
    for _ in range(2):
        curve.observe(4, 2.4)
    assert curve.seconds(4) == before
    for _ in range(4):
        curve.observe(4, 2.4)
    assert curve.seconds(4) == pytest.approx(2.4, rel=0.1)
    assert curve.seconds(0) == pytest.approx(2.0, rel=0.1)


def test_a_median_counts_for_as_many_times_as_it_stands_for() -> None:
    """Catches four steps told at once that teach as little as one, or as much as certainty."""
    doubts = []
    for counts in ([1], [4], [1, 1, 1, 1]):
        curve = CostCurve(8, Slope(0.05, 0.2))
        curve.observe(0, 1.0, count=100)
        for count in counts:
            curve.observe(3, 1.2, count=count)
        doubts.append(curve.doubts_of([3])[0])
    one, at_once, in_turn = doubts
    assert at_once < 0.7 * one
    assert 0.7 < at_once / in_turn < 1.25


def test_one_size_may_have_become_dear_alone() -> None:
    """Its own times say so, its neighbours' say that they did not."""
    curve = told()
    for _ in range(30):
        for size, seconds in ((8, 1.8), (0, 1.0), (3, 1.15)):
            curve.observe(size, seconds)
    assert curve.seconds(8) == pytest.approx(1.8, rel=0.04)
    assert curve.seconds(3) == pytest.approx(1.15, rel=0.04)


def test_a_spoilt_first_time_is_repaired_by_the_next() -> None:
    curve = curve_of(n3=[1.15], n0=[5.0, 1.0, 1.0])
    assert curve.seconds(0) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("times", [10, 1e3, 1e5])
@pytest.mark.parametrize("again", [0, 3])
def test_a_spoilt_first_time_of_all_does_not_spoil_the_other_sizes(times: float, again: int) -> None:
    """A program that is built, a laptop that was asleep: the only time there is, and all sizes are guessed from it. Guards
    against sizes that are dear for ever, and against covariances that rounding turns negative."""
    curve = CostCurve(8, Slope(0.05, 0.2))
    curve.observe(3, 1.15 * times)
    for size in [again, *[0, 1, 2, 3, 4, 3, 5, 4, 6, 5] * 8]:
        curve.observe(size, 1 + 0.05 * size)
    assert curve.seconds_of(range(9)) == pytest.approx([1 + 0.05 * size for size in range(9)], rel=0.1)


def test_wider_steps_than_can_be_asked_for_tell_nothing() -> None:
    curve = told()
    before = curve.seconds_of(range(9))
    curve.observe(12, 9.0)
    assert curve.seconds_of(range(9)) == before
    assert 12 not in curve.known()


def test_asking_in_vain_drifts_with_the_machine_and_is_no_size() -> None:
    curve = told()
    for _ in range(8):
        curve.observe(VAIN, 1.3)
    for _ in range(60):
        curve.observe(2, 2.2)  # twice as slow as it was
    assert curve.seconds_of([VAIN])[0] == pytest.approx(2.6, rel=0.06)
    assert list(curve.known()) == list(range(9))


# ------------------------------------------------ what an ask costs


def test_an_ask_costs_what_is_drafted() -> None:
    """Half of the asks bring 2 nodes, half nothing: half the price of two nodes, whether 2 or 8 are asked for."""
    offers = Offers(curve=curve_of(n0=[1.0], n2=[1.4]))
    for step in range(400):
        offers.observe([([8], [2 * (step % 2)])])
    assert offers.share == pytest.approx(0.5, abs=0.02)
    assert offers.seconds_of([0, 2, 8]) == pytest.approx([1.0, 1.2, 1.2], abs=0.01)


def test_an_ask_in_vain_has_its_own_price() -> None:
    """A model that stops before its first token has run; a plain step has not."""
    offers = Offers()
    offers.observe_seconds(VAIN, 1.5, now=1)
    assert offers.seconds_of([0, 4]) is None
    assert not offers.is_measured
    offers.observe_seconds(0, 1.0, now=4)
    assert offers.is_measured
    for _ in range(100):
        offers.observe([([4, 4], [0, 0])])
    assert offers.seconds_of([0, 4]) == pytest.approx([1.0, 1.5], abs=0.01)


def test_steps_of_several_kinds_are_learned_from_at_once() -> None:
    """As one by one, but that all count as if they came last; plain ones among them say nothing."""
    together, single = Offers(curve=curve_of(n0=[1.0], n2=[1.4])), Offers(curve=curve_of(n0=[1.0], n2=[1.4]))
    steps = [([8], [2]), ([8], [0]), ([0], [0]), ([4], [4])]
    for _ in range(200):
        together.observe(steps)
        for step in steps:
            single.observe([step])
    assert together.share == pytest.approx(single.share, abs=0.02)
    assert together.seconds_of([0, 2, 8]) == pytest.approx(single.seconds_of([0, 2, 8]), abs=0.02)


def test_plain_steps_say_nothing_about_offers() -> None:
    """Fading while nobody asks would bring back the belief that everything asked for is offered."""
    offers = Offers()
    for _ in range(50):
        offers.observe([([4], [0])])
    before = offers.share
    for _ in range(500):
        offers.observe([([0], [0])])
    assert offers.share == before < 0.01


# ------------------------------------------------ probes


def test_plain_steps_are_checked_only_where_they_are_close_and_ever_more_rarely() -> None:
    checks = PlainChecks()
    assert [step for step in range(100) if checks.due(1, gain=1.2) == 0] == [8, 25, 58]  # behind 8, 16, 32 steps that draft
    assert all(checks.due(7, gain=2.0) is None for _ in range(1000))


@pytest.mark.parametrize("many", [1, 2, 7, 9])
def test_checks_of_steps_planned_at_once_come_when_they_would_have_come_one_by_one(many: int) -> None:
    """But for a second one within a plan."""
    for make, due in ((PlainChecks, lambda checks, n: checks.due(n, 1.2)), (GrowthChecks, lambda checks, n: checks.due(n))):
        single, planned = make(), make()
        one_by_one = [step for step in range(400) if due(single, 1) == 0]
        together = [start + place for start in range(0, 400, many) if (place := due(planned, many)) is not None]
        later = [(a, b) for a, b in zip(one_by_one, together, strict=False) if a != b]
        assert all(0 < b - a < many for a, b in later), later


def test_a_plain_step_taken_anyway_is_a_check() -> None:
    checks = PlainChecks()
    for _ in range(100):
        assert not any(checks.due(1, gain=1.2) == 0 for _ in range(8))
        checks.restart()


@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_plain_steps_planned_at_once_end_where_a_try_is_due(most: int) -> None:
    """The same tries as by asking before each step."""

    def steps(most: int) -> list[int]:
        tries, found, step = Tries(), [], 0
        while step < 400:
            if tries.is_due(0.2):
                found.append(step)
                tries.observe(0)
                step += 1
            else:
                planned = tries.wait(most)
                assert planned <= most
                step += planned
        return found

    assert steps(most) == steps(1)


def test_tries_become_rarer_as_far_as_their_price_allows() -> None:
    """Cheap tries stay frequent, dear ones end in a long pause."""
    def steps(price: float) -> list[int]:
        tries, found = Tries(), []
        for step in range(600):
            if tries.is_due(price):
                found.append(step)
                tries.observe(0)
        return found

    assert steps(0.0)[:3] == [6, 13, 20]
    assert steps(0.2)[:4] == [6, 19, 44, 85]  # pauses 6, 12, 24, 40 = 0.2 / 0.005
    assert len(steps(0.2)) > len(steps(1.0))


def test_a_lasting_change_surprises_and_chance_does_not() -> None:
    surprise = Surprise()
    assert not any(surprise.observe(error) for error in [1.0, -1.0] * 100)
    assert not surprise.observe(None)
    assert any(surprise.observe(-1.5) for _ in range(8))


def test_a_try_goes_on_while_something_is_kept_or_nothing_is_offered() -> None:
    for accepted, goes_on in ((0, False), (1, True), (None, True)):
        tries = Tries()
        while not tries.is_due(0.2):
            pass
        tries.observe(accepted)
        assert tries.is_open == goes_on
