"""`--num-draft-tokens auto` against worlds whose best choice is known: it must find it, cheaply, and find it again.

Bounds are those of the product's promise (0.97 of the best fixed length, 0.98 of plain decoding), over means of several seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

import pytest
import torch

from outrider.draft_length import Goodput
from outrider.draft_length.goodput import MOST_PLANNED, PLAN_S
from outrider.draft_length.offers import Offers
from outrider.draft_length.survival import Outcome
from outrider.draft_length.waiting import Step
from outrider.types import Draft, VerdictLists
from tests.unit.draft_length.simulator import Run, World, best_rate, linear, plain_rate

CHAIN = list(range(9))
TREE = [0, 1, 2, 4, 8, 12, 16]


PASSES = pytest.mark.parametrize("unit", [1.0, 0.005])  # seconds: long steps are looked at one by one, short ones are planned


def chain(seed: int = 0, num_rows: int = 1, length: int = 10**6, unit: float = 1.0) -> Run:
    return Run(Goodput(8, trees=False), seed, num_rows, length, unit)


def score(world: World, steps: int = 400, seeds: int = 3, unit: float = 1.0) -> float:
    """Rate over that of the best fixed length, warm-up included."""
    return mean(chain(seed, unit=unit).steps(world, steps).rate for seed in range(seeds)) / best_rate(world, CHAIN)


# ------------------------------------------------ it finds the best length


@PASSES
@pytest.mark.parametrize("verify", [0.0, 0.04])
@pytest.mark.parametrize("draft", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
def test_it_finds_the_best_length(alpha: float, draft: float, verify: float, unit: float) -> None:
    """Any wrong term in tokens or seconds, a warm-up that costs too much, a length it never comes to."""
    assert score(World(alpha, linear(draft, verify)), unit=unit) > 0.97


@PASSES
@pytest.mark.parametrize(("alpha", "draft"), [(0.5, 0.05), (0.8, 0.3), (0.95, 0.01)])
def test_a_short_text_already_gains(alpha: float, draft: float, unit: float) -> None:
    """About 250 tokens: what the first steps cost."""
    world = World(alpha, linear(draft))
    assert score(world, steps=round(250 / world.tokens(4)), seeds=6, unit=unit) > 0.95


def test_a_step_in_the_cost_is_seen() -> None:
    """Passes of more than 5 tokens cost twice as much: a straight line alone would never see it."""
    world = World(0.9, lambda width, rows: (1 if width <= 4 else 2) + 0.02 * width)
    run = chain().steps(world, 400)
    assert run.counts.most_common(1)[0][0] == 4
    assert run.rate > 0.97 * best_rate(world, CHAIN)


@PASSES
@pytest.mark.parametrize(("alpha", "draft"), [(0.1, 0.3), (0.02, 0.05), (0.0, 0.01), (0.3, 0.5), (0.4, 0.6)])
def test_where_drafting_never_pays_it_costs_little(alpha: float, draft: float, unit: float) -> None:
    """Tries that are too many or too long."""
    world = World(alpha, linear(draft), noise=0.03)
    runs = [chain(seed, unit=unit).steps(world, 400) for seed in range(3)]
    assert mean(run.rate for run in runs) > 0.98 * plain_rate(world)


# ------------------------------------------------ it follows changes, and nothing but changes


@PASSES
@pytest.mark.parametrize("draft", [0.05, 0.3])
@pytest.mark.parametrize(("before", "after"), [(0.1, 0.9), (0.9, 0.1)])
def test_it_follows_a_change_of_text(before: float, after: float, draft: float, unit: float) -> None:
    """Knowledge that never fades, depths given up for ever, pauses that grow without bound."""
    world, rates = World(after, linear(draft)), []
    for seed in range(4):
        run = chain(seed, unit=unit).steps(World(before, linear(draft)), 300)
        earned, spent = run.earned, run.spent
        run.steps(world, 300)
        rates.append((run.earned - earned) / (run.spent - spent))
        assert (mean(run.asked[-50:]) > 2) == (after == 0.9)
    assert mean(rates) > 0.9 * best_rate(world, CHAIN)


@PASSES
@pytest.mark.parametrize(("alpha", "draft"), [(0.8, 0.05), (0.5, 0.3), (0.1, 0.3)])
def test_a_noisy_clock_does_not_make_it_flip(alpha: float, draft: float, unit: float) -> None:
    """10 % noise and steps of five times their length: probes and a few changes are all that may happen in 350 steps."""
    world = World(alpha, linear(draft), noise=0.1, outliers=0.02)
    runs = [chain(seed, unit=unit).steps(world, 400) for seed in range(3)]
    assert mean(run.flips(after=50) for run in runs) < 30
    assert mean(run.rate for run in runs) > 0.96 * best_rate(world, CHAIN)


def test_a_spoilt_first_plain_step_is_forgotten() -> None:
    """The only plain time says 5 where 1 is true: drafting then looks five times as good as it is."""
    control = Goodput(8, trees=False)
    run = Run(control, num_rows=1).steps(World(0.1, linear(0.3)), 2)
    run.steps(World(0.1, linear(1.5, 4.0), outliers=1.0), 1)
    run.steps(World(0.1, linear(0.3)), 200)
    assert run.asked[2] == 0
    assert run.asked[-100:].count(0) > 80


def test_the_same_clock_gives_the_same_lengths() -> None:
    world = World(0.7, linear(0.1), noise=0.1)
    assert chain(3).steps(world, 200).asked == chain(3).steps(world, 200).asked


def test_asking_what_is_predicted_changes_nothing() -> None:
    """Catches a simulation that makes the control learn at once what it would learn later."""
    left_alone, asked = chain(3).steps(world := World(0.7, linear(0.1), noise=0.1), 200), chain(3)
    while len(asked.asked) < 200:
        asked.steps(world, 1).control.goodput(1)
    assert asked.asked == left_alone.asked


# ------------------------------------------------ what it was told beforehand


@pytest.mark.parametrize("slow", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("alpha", "best"), [(0.95, 8), (0.1, 0)])
def test_told_what_steps_cost_it_need_not_find_out(slow: float, alpha: float, best: int) -> None:
    """From another hour, when the machine was faster or slower: right after a handful of steps, not after dozens."""
    world = World(alpha, linear(0.05, 0.02), noise=0.03)
    rates = []
    for seed in range(6):
        control = Goodput(8, trees=False)
        control.learn_costs(1, {size: slow * world.cost(size, 1) for size in CHAIN})
        run = Run(control, seed).steps(world, 40)
        assert run.asked[0] != 0
        assert run.counts.most_common(1)[0][0] in (best, max(best - 1, 0), 1 if best == 0 else best)
        rates.append(run.rate)
    assert mean(rates) > 0.95 * best_rate(world, CHAIN)


def test_what_it_was_told_is_corrected() -> None:
    """A file from a machine on which drafts cost nothing: here they cost half a pass each."""
    world, control = World(0.3, linear(0.5), noise=0.03), Goodput(8, trees=False)
    control.learn_costs(1, {size: 1.0 for size in CHAIN})
    run = Run(control).steps(world, 300)
    assert run.asked[-150:].count(0) > 120


# ------------------------------------------------ batches


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_rows_that_join_and_leave(alpha: float) -> None:
    """A prompt's seconds must not count as a step's, and what one row has taught serves the next."""
    world = World(alpha, lambda width, rows: 1 + 0.02 * rows * width, noise=0.03)
    run = chain(num_rows=4, length=60).steps(world, 400)
    assert run.rate > 0.95 * best_rate(world, CHAIN, num_rows=4)  # which knows no ends of rows


def test_each_number_of_rows_has_its_own_best() -> None:
    """One row: a pass is free in its width. Four rows: it is not."""
    world = World(0.7, lambda width, rows: 1 + (0.01 if rows == 1 else 0.6) * width)
    control = Goodput(8, trees=False)
    many = Run(control, num_rows=4).steps(world, 150)
    alone = Run(control).steps(world, 150)
    assert mean(many.asked[-50:]) < 2 < 5 < mean(alone.asked[-50:])
    back = Run(control, num_rows=4).steps(world, 20)
    assert mean(back.asked) < 2


def test_eight_rows_as_they_were_traced_on_a_server() -> None:
    """Milliseconds by width, and what was kept, of a 100M target on two cores: nothing or two nodes are best, and close; one node
    is the worst of the short ones, since the first draft token of a crowd is dear. It must not stay there."""
    costs = {0: 10.3, 1: 18.9, 2: 23.4, 3: 29.0, 4: 38.0, 5: 40.0, 6: 42.0, 7: 44.0, 8: 46.0}
    world = World(0.75, lambda width, rows: costs[width], noise=0.08, outliers=0.02)
    runs = []
    for seed in range(12):
        control = Goodput(8, trees=False)
        control.learn_costs(8, {size: 0.0012 * cost for size, cost in costs.items() if size in (0, 1, 2, 3, 4, 8)})
        runs.append(Run(control, seed, num_rows=8, length=64, unit=0.001).steps(world, 300))
    assert mean(run.counts[1] for run in runs) < 30
    assert mean(run.rate for run in runs) > 0.97 * best_rate(world, CHAIN, num_rows=8)


def test_what_is_read_for_drafts_is_part_of_their_price() -> None:
    """Steps with drafts bring 5 % more tokens a second; reading the prompts for them takes a tenth of the time, or nothing."""
    world = World(0.7, lambda width, rows: 1 + 0.62 * width)
    shares = []
    for reading in (0.0, 0.1):
        control = Goodput(8, trees=False)
        before = Run(control, num_rows=8).steps(world, 100).control.goodput(8)
        control.learn_reading(reading / 8)  # seconds per token; a plain step brings eight in one second
        after = control.goodput(8)
        assert before is not None
        assert after is not None
        assert after[0] == before[0], "without drafts nobody reads"
        assert 1 / after[1] == pytest.approx(1 / before[1] + reading / 8)
        shares.append(Run(control, num_rows=8).steps(world, 300).asked[-200:].count(0) / 200)
    assert shares[0] < 0.2
    assert shares[1] > 0.8


def test_a_try_asks_a_few_rows_of_a_crowd() -> None:
    """Each may have a long text to be read first, and four show as well whether anything is kept."""
    control = Goodput(8, trees=False)
    run, world, asked = Run(control, num_rows=16), World(0.1, linear(0.5)), set()
    run.steps(world, 100)
    for _ in range(200):
        run.steps(world, 1)
        asked.add(run.rows_asked)
    assert asked == {0, 4}


def test_drafting_begins_again_when_what_it_has_promised_pays_for_the_reading() -> None:
    """What must be read first costs three plain steps, drafting promises a tenth of one each step: neither at once nor never."""
    waited = []
    for unread in (0.0, 3.0):
        control = Goodput(8, trees=False)
        run = Run(control, num_rows=8).steps(World(0.05, linear(0.5)), 200)
        assert control.settled == 0
        control.learn_unread(unread)
        better, steps = World(0.8, linear(0.2)), 0
        while not control.settled:
            run.steps(better, 1)
            steps += 1
            assert steps < 400
        waited.append(steps)
    assert waited[0] < waited[1]


def test_where_few_are_read_drafting_may_wait_for_the_others() -> None:
    control = Goodput(8, trees=False)
    Run(control, num_rows=8).steps(World(0.7, linear(0.4)), 200)
    assert control.settled > 0
    assert control.pays_for(8, 8, 8)
    assert control.pays_for(7, 8, 8)
    assert not control.pays_for(1, 8, 8)


def test_crowds_of_nearly_as_many_rows_know_together() -> None:
    """At 14 to 18 rows a node costs four fifths of a plain step and brings less; one plain step of 16 rows was slow."""
    control = Goodput(8, trees=False)
    Run(control).steps(World(0.5, linear(0.02)), 50)  # half of the nodes are kept, whatever they cost
    for _ in range(6):
        for rows in (14, 15, 17, 18):
            for size in (0, 1, 2, 8):
                control.learn_cost(rows, size, 1 + 0.8 * size)
    control.learn_cost(16, 0, 2.6)
    control.learn_cost(16, 1, 1.8)
    alone = control.goodput(16)
    assert alone is not None
    assert alone[1] > 1.1 * alone[0], "what the 16 rows would believe by themselves"
    assert [control.next_size(rows) for rows in (16, 15, 16, 17)] == [0, 0, 0, 0]


def test_a_crowd_never_seen_costs_what_lies_between_its_neighbours() -> None:
    """Told what one and eight rows cost, four are right from the first step."""
    world = World(0.7, lambda width, rows: 1 + 0.1 * (rows - 1) * width)
    control = Goodput(8, trees=False)
    for rows in (1, 8):
        for size in (0, 4, 8):
            control.learn_cost(rows, size, world.cost(size, rows))
    rates = control.goodput(4)
    assert rates is not None
    seconds = {size: 4 * (1 + control.goodput(1)[size] * world.cost(size, 1) - 1) / rate for size, rate in rates.items()}  # type: ignore[index]
    assert seconds[8] == pytest.approx(world.cost(8, 4), rel=0.05)
    assert control.goodput(16) is None, "nothing is known beyond the last neighbour"


def test_no_row_is_asked_for_more_than_it_has_room_for() -> None:
    """Also while warming up; the verifier's own token needs room too."""
    run = chain(length=5)
    for _ in range(60):
        run.steps(World(0.9, linear(0.01)), 1)
        assert all(row.room >= 0 for row in run.rows)


# ------------------------------------------------ drafters that offer less than asked


@PASSES
@pytest.mark.parametrize("verify", [0.01, 0.06])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("offers", [0.05, 0.3])
def test_a_drafter_that_often_offers_nothing(offers: float, alpha: float, verify: float, unit: float) -> None:
    """Steps without an offer are no failures of the drafter, and their cheapness is not the drafter's either."""
    assert score(World(alpha, linear(0, verify), offers=offers, noise=0.03), unit=unit) > 0.975


def test_asking_in_vain_is_given_up_where_it_costs() -> None:
    """A model that always stops before its first token runs a pass for nothing; an ask is not a plain step."""
    run = chain().steps(World(0.5, linear(0.0), offers=0.0, vain=0.2), 300)
    assert run.asked[-250:].count(0) > 225


# ------------------------------------------------ trees


@PASSES
@pytest.mark.parametrize("nodes", [0.005, 0.02, 0.08])
@pytest.mark.parametrize("shape", ["logarithm", "saturating", "poor"])
def test_trees_of_the_best_size(shape: str, nodes: float, unit: float) -> None:
    """Kept nodes grow with the size, ever more slowly: neither the smallest nor the largest, and no size for ever."""
    curve = {
        "logarithm": lambda n: 0.7 * math.log2(1 + n),
        "saturating": lambda n: 3 * (1 - 0.8**n),
        "poor": lambda n: 0.4 * (1 - 0.5**n),
    }[shape]
    world = World(0, linear(nodes), tree=curve, noise=0.02)
    runs = [Run(Goodput(16, trees=True), seed, unit=unit).steps(world, 400) for seed in range(3)]
    assert mean(run.rate for run in runs) > 0.95 * best_rate(world, TREE)


# ------------------------------------------------ the report


def test_summary_adds_up() -> None:
    """Steps counted once; regret against the best fixed length, which a mix cannot beat."""
    run = chain().steps(World(0.6, linear(0.1)), 120)
    Run(run.control, num_rows=2).steps(World(0.6, linear(0.1)), 30)
    report = run.control.summary()
    assert sum(report["chosen"].values()) == 150
    assert {rows: sum(part["chosen"].values()) for rows, part in report["by_rows"].items()} == {1: 120, 2: 30}
    for rows, part in report["by_rows"].items():
        rates, best = part["tokens_per_s"], part["best_fixed"]
        assert list(rates) == CHAIN
        assert rates[best] == max(rates.values())
        assert rates[0] == pytest.approx(rows, rel=0.01)
        assert 0 <= part["regret"] < 0.2
    assert report["by_rows"][1]["seconds"][0] == pytest.approx(1)


def test_regret_is_zero_where_only_the_best_was_chosen() -> None:
    control = Goodput(1, trees=False)
    Run(control).steps(World(1.0, linear(0.0)), 50)
    chosen, part = control.summary()["chosen"], control.summary()["by_rows"][1]
    share = chosen.get(0, 0) / 50  # plain steps bring half the tokens in the same time
    assert part["regret"] == pytest.approx(share / 2, abs=0.01)


def test_summary_before_anything_was_measured() -> None:
    assert Goodput(4, trees=False).summary() == {"chosen": {}, "by_rows": {}}


def test_what_a_step_asked_for_is_counted_once_it_was_taken() -> None:
    """Steps are planned ahead: what was planned for a number of rows that never came again was not chosen."""
    control = Goodput(8, trees=False)
    run = Run(control, 0).steps(World(0.8, linear(0.05)), 150)
    assert sum(control.summary()["chosen"].values()) == sum(run.counts.values())


def test_a_tree_that_says_which_node_came_when_is_known_at_every_size() -> None:
    """Two kept of eight, always the first two: two is best, though nothing but eight was ever asked for."""
    control = Goodput(8, trees=True)
    control.learn_costs(1, {size: 1 + 0.05 * size for size in range(9)})
    for _ in range(40):
        control.learn([8], [8], VerdictLists([[0, 1]], [2], [0], [False]), [[1, 2, *range(3, 9)]], 1.4)
    rates = control.goodput(1)
    assert rates is not None
    assert max(rates, key=lambda size: rates[size]) == 2


def test_what_kept_nodes_needed_is_read_off_the_path() -> None:
    """Two rows of a draft; the second kept its third node, then its fourth."""
    draft = Draft(
        torch.zeros(2, 4, dtype=torch.int64), torch.tensor([2, 4]), torch.tensor([[-1, 0, -1, -1], [-1, 0, -1, 2]]),
        budgets=[[1, 4, 4, 4], [1, 2, 3, 6]],
    )  # fmt: skip
    verdict = VerdictLists([[0, -1, -1, -1], [2, 3, -1, -1]], [1, 2], [0, 0], [False, True])
    step = Step(4, [4, 4], [2, 4], verdict, draft.budgets, 1.0, None)
    assert step.outcomes() == [Outcome(4, 1, False, (1,)), Outcome(4, 2, True, (3, 6))]
    assert step._replace(mine=[1]).outcomes() == [Outcome(4, 2, True, (3, 6))]
    assert [one.budgets for one in step._replace(budgets=[None, [1, 2, 3, 6]]).outcomes()] == [None, (3, 6)]
    assert [one.budgets for one in step._replace(budgets=None).outcomes()] == [None, None]
    assert step._replace(drafted=[0, 4]).outcomes() == [Outcome(4, 2, True, (3, 6))]


def test_rows_are_compared_with_what_they_asked_for() -> None:
    """Catches a batch of rows with bounds of their own that surprises for ever, since its widest row would have kept more."""
    verdict = VerdictLists([[0, 1, 2], [0], [], []], [3, 1, 0, 0], [0] * 4, [False, True, True, False])
    step = Step(8, [8, 1, 8, 5], [8, 1, 0, 5], verdict, None, 1.0, None)
    expected = {0: 0.0, 1: 0.5, 8: 4.0}
    assert step.error(expected) == pytest.approx((3 - 4 + 1 - 0.5) / 2)  # the third was offered nothing, the last is not known
    assert step._replace(mine=[1]).error(expected) == pytest.approx(0.5)
    assert step._replace(mine=[2, 3]).error(expected) is None


def test_a_tree_that_does_not_say_has_not_lost_its_nodes() -> None:
    """One row's drafter says which node came when, another's does not: that is no news of nodes that were not kept."""
    control = Goodput(8, trees=True)
    control.learn_costs(2, {size: 1 + 0.05 * size for size in range(9)})
    verdict = VerdictLists([[0, 1], [0, 1]], [2, 2], [0, 0], [False, False])
    for _ in range(40):
        control.learn([8, 8], [8, 8], verdict, [[*range(1, 9)], None], 1.4)
        control.learn([8, 8], [8, 8], verdict, None, 1.4)
    rates = control.goodput(2)
    assert rates is not None
    assert rates[8] == pytest.approx(2 * 3 / 1.4, rel=0.1)  # half as much kept: 2.9


def batches(control: Goodput, run: Run, world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were learned from at once."""
    found, learn = list[int](), control._learn_seconds

    def counted(offers: Offers, steps: Sequence[Step]) -> None:
        found.append(len(steps))
        learn(offers, steps)

    monkeypatch.setattr(control, "_learn_seconds", counted)
    run.steps(world, 1500)
    return found


def test_the_longer_a_run_the_more_steps_are_learned_from_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps that wait for ever, and a pace that is asked of another number of rows."""
    control = Goodput(8, trees=False)
    found = batches(control, Run(control, unit=0.001), World(0.8, linear(0.05)), monkeypatch)
    assert max(found[:4]) <= 2
    assert found[-1] == max(found) == MOST_PLANNED
    assert sum(found) > 1500 - 2 * MOST_PLANNED


def test_steps_that_are_long_are_learned_from_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Goodput(8, trees=False)
    found = batches(control, Run(control, unit=PLAN_S / 1.5), World(0.8, linear(0.05)), monkeypatch)
    assert set(found) == {1}
    assert sum(found) == 1500
