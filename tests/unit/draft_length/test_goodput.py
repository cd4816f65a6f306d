"""`--num-draft-tokens auto` against worlds whose best choice is known: it must find it, cheaply,
and find it again.

Bounds are those of the product's promise (0.97 of the best fixed length, 0.98 of plain decoding),
over means of several seeds.
"""

from __future__ import annotations

import math
from statistics import mean

import pytest

from outrider.draft_length import Goodput, goodput
from outrider.draft_length.costs import LengthCosts
from outrider.draft_length.goodput import MAX_PLAN, ObservedStep
from outrider.draft_length.survival import Phase
from outrider.types import VerdictLists
from tests.unit.draft_length.simulator import Run, World, best_rate, linear, plain_rate

CHAIN = list(range(9))
TREE = [0, 1, 2, 4, 8, 12, 16]


def chain(seed: int = 0, num_rows: int = 1, length: int = 10**6) -> Run:
    return Run(Goodput(8, trees=False), seed, num_rows, length)


def score(world: World, steps: int = 400, seeds: int = 3) -> float:
    """Rate over that of the best fixed length, warm-up included."""
    return mean(chain(seed).steps(world, steps).rate for seed in range(seeds)) / best_rate(
        world, CHAIN
    )


# ------------------------------------------------ it finds the best length


@pytest.mark.parametrize("verify", [0.0, 0.04])
@pytest.mark.parametrize("draft", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
def test_it_finds_the_best_length(alpha: float, draft: float, verify: float) -> None:
    """Any wrong term in tokens or seconds, a warm-up that costs too much, a length it never comes
    to."""
    assert score(World(alpha, linear(draft, verify))) > 0.97


@pytest.mark.parametrize(("alpha", "draft"), [(0.5, 0.05), (0.8, 0.3), (0.95, 0.01)])
def test_a_short_text_already_gains(alpha: float, draft: float) -> None:
    """About 250 tokens: what the first steps cost."""
    world = World(alpha, linear(draft))
    assert score(world, steps=round(250 / world.tokens(4)), seeds=6) > 0.95


def test_a_step_in_the_cost_is_seen() -> None:
    """Passes of more than 5 tokens cost twice as much: a straight line alone would never see it."""
    world = World(0.9, lambda width, rows: (1 if width <= 4 else 2) + 0.02 * width)
    run = chain().steps(world, 400)
    assert run.counts.most_common(1)[0][0] == 4
    assert run.rate > 0.97 * best_rate(world, CHAIN)


@pytest.mark.parametrize(
    ("alpha", "draft"), [(0.1, 0.3), (0.02, 0.05), (0.0, 0.01), (0.3, 0.5), (0.4, 0.6)]
)
def test_where_drafting_never_pays_it_costs_little(alpha: float, draft: float) -> None:
    """Tries that are too many or too long."""
    world = World(alpha, linear(draft), noise=0.03)
    runs = [chain(seed).steps(world, 400) for seed in range(3)]
    assert mean(run.rate for run in runs) > 0.98 * plain_rate(world)


# ------------------------------------------------ it follows changes, and nothing but changes


@pytest.mark.parametrize("draft", [0.05, 0.3])
@pytest.mark.parametrize(("before", "after", "floor"), [(0.1, 0.9, 0.9), (0.9, 0.1, 0.8)])
def test_it_follows_a_change_of_text(
    before: float, after: float, floor: float, draft: float
) -> None:
    """Knowledge that never fades, depths given up for ever, pauses that grow without bound."""
    world = World(after, linear(draft))
    rates = []
    for seed in range(4):
        run = chain(seed).steps(World(before, linear(draft)), 300)
        earned = run.earned
        spent = run.spent
        run.steps(world, 300)
        rates.append((run.earned - earned) / (run.spent - spent))
        assert (mean(run.asked[-50:]) > 2) == (after == 0.9)
    assert mean(rates) > floor * best_rate(world, CHAIN)


@pytest.mark.parametrize(("alpha", "draft"), [(0.8, 0.05), (0.5, 0.3), (0.1, 0.3)])
def test_a_noisy_clock_does_not_make_it_flip(alpha: float, draft: float) -> None:
    """10 % noise and steps of five times their length: probes and a few changes are all that may
    happen in 350 steps."""
    world = World(alpha, linear(draft), noise=0.1, outliers=0.02)
    runs = [chain(seed).steps(world, 400) for seed in range(8)]
    assert mean(run.flips(after=50) for run in runs) < 30
    assert mean(run.rate for run in runs) > 0.96 * best_rate(world, CHAIN)


def test_the_same_clock_gives_the_same_lengths() -> None:
    world = World(0.7, linear(0.1), noise=0.1)
    assert chain(3).steps(world, 200).asked == chain(3).steps(world, 200).asked


def test_asking_what_is_predicted_changes_nothing() -> None:
    """Catches a simulation that makes the control learn at once what it would learn later."""
    left_alone = chain(3).steps(world := World(0.7, linear(0.1), noise=0.1), 200)
    asked = chain(3)
    while len(asked.asked) < 200:
        asked.steps(world, 1).control.goodput(1)
    assert asked.asked == left_alone.asked


# ------------------------------------------------ what it was given beforehand


@pytest.mark.parametrize("slow", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("alpha", "best"), [(0.95, 8), (0.1, 0)])
def test_given_what_steps_cost_it_need_not_find_out(slow: float, alpha: float, best: int) -> None:
    """From another hour, when the machine was faster or slower: right after a handful of steps, not
    after dozens."""
    world = World(alpha, linear(0.05, 0.02), noise=0.03)
    rates = []
    for seed in range(6):
        control = Goodput(8, trees=False)
        control.learn_costs(1, {size: slow * world.cost(size, 1) for size in CHAIN})
        run = Run(control, seed).steps(world, 40)
        assert run.asked[0] != 0
        assert run.counts.most_common(1)[0][0] in ((7, 8) if best else (0, 1, 2))
        rates.append(run.rate)
    assert mean(rates) > 0.95 * best_rate(world, CHAIN)


def test_what_it_was_given_is_corrected() -> None:
    """A file from a machine on which drafts cost nothing: here they cost half a pass each."""
    world = World(0.3, linear(0.5), noise=0.03)
    control = Goodput(8, trees=False)
    control.learn_costs(1, {size: 1.0 for size in CHAIN})
    run = Run(control).steps(world, 300)
    assert run.asked[-150:].count(0) > 120


# ------------------------------------------------ batches


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_rows_that_join_and_leave(alpha: float) -> None:
    """A prompt's seconds must not count as a step's, and what one row has taught serves the next."""
    world = World(alpha, lambda width, rows: 1 + 0.02 * rows * width, noise=0.03)
    runs = [chain(seed, num_rows=4, length=60).steps(world, 400) for seed in range(4)]
    # which knows no ends of rows
    assert mean(run.rate for run in runs) > 0.95 * best_rate(world, CHAIN, num_rows=4)


def test_each_number_of_rows_has_its_own_best() -> None:
    """One row: a pass is free in its width. Four rows: it is not."""
    world = World(0.7, lambda width, rows: 1 + (0.01 if rows == 1 else 0.6) * width)
    control = Goodput(8, trees=False)
    many = Run(control, num_rows=4).steps(world, 150)
    alone = Run(control).steps(world, 150)
    assert mean(many.asked[-50:]) < 2 < 5 < mean(alone.asked[-50:])
    back = Run(control, num_rows=4).steps(world, 20)
    assert mean(back.asked) < 2


@pytest.mark.slow
def test_eight_rows_as_they_were_traced_on_a_server() -> None:
    """Milliseconds by width, and what was kept, of a 100M target on two cores: nothing or two nodes
    are best, and close; one node is the worst of the short ones, since the first draft token of a
    crowd is expensive. It must not stay there."""
    costs = {0: 10.3, 1: 18.9, 2: 23.4, 3: 29.0, 4: 38.0, 5: 40.0, 6: 42.0, 7: 44.0, 8: 46.0}
    world = World(0.75, lambda width, rows: costs[width], noise=0.08, outliers=0.02)
    runs = []
    for seed in range(12):
        control = Goodput(8, trees=False)
        control.learn_costs(
            8, {size: 0.0012 * cost for size, cost in costs.items() if size in (0, 1, 2, 3, 4, 8)}
        )
        runs.append(Run(control, seed, num_rows=8, length=64, unit=0.001).steps(world, 300))
    assert mean(run.counts[1] for run in runs) < 30
    assert mean(run.rate for run in runs) > 0.97 * best_rate(world, CHAIN, num_rows=8)


def test_what_is_read_for_drafts_is_part_of_their_price() -> None:
    """Steps with drafts bring 5 % more tokens a second; reading the prompts for them takes a tenth
    of the time, or nothing."""
    world = World(0.7, lambda width, rows: 1 + 0.62 * width)
    shares = []
    for reading in (0.0, 0.1):
        control = Goodput(8, trees=False)
        before = Run(control, num_rows=8).steps(world, 100).control.goodput(8)
        # seconds per token; a plain step brings eight in one second
        control.reading_s = reading / 8
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
    run = Run(control, num_rows=16)
    world = World(0.1, linear(0.5))
    asked = set()
    run.steps(world, 100)
    for _ in range(200):
        run.steps(world, 1)
        asked.add(run.rows_asked)
    assert asked == {0, 4}


def test_drafting_begins_again_when_what_it_has_promised_pays_for_the_reading() -> None:
    """What must be read first costs thirty plain steps, drafting promises a part of one each step:
    neither at once nor never."""
    waited = []
    for unread in (0.0, 30.0):
        control = Goodput(8, trees=False)
        run = Run(control, num_rows=8).steps(World(0.05, linear(0.5)), 200)
        assert control.settled(8) == 0
        control.unread_s = unread
        better = World(0.8, linear(0.2))
        steps = 0
        while not control.settled(8):
            run.steps(better, 1)
            steps += 1
            assert steps < 400
        waited.append(steps)
    assert waited[0] < waited[1]


def test_where_few_are_read_drafting_may_wait_for_the_others() -> None:
    control = Goodput(8, trees=False)
    Run(control, num_rows=8).steps(World(0.7, linear(0.4)), 200)
    assert control.settled(8) > 0
    assert control.pays_for(8, 8, 8)
    assert control.pays_for(7, 8, 8)
    assert not control.pays_for(1, 8, 8)


def test_no_row_is_asked_for_more_than_it_has_room_for() -> None:
    """Also while warming up; the verifier's own token needs room too."""
    run = chain(length=5)
    for _ in range(60):
        run.steps(World(0.9, linear(0.01)), 1)
        assert all(row.room >= 0 for row in run.rows)


# ------------------------------------------------ drafters that offer less than asked


@pytest.mark.parametrize("verify", [0.01, 0.06])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("offers", [0.05, 0.3])
def test_a_drafter_that_often_offers_nothing(offers: float, alpha: float, verify: float) -> None:
    """Steps without an offer are no failures of the drafter, and their cheapness is not the
    drafter's either."""
    assert score(World(alpha, linear(0, verify), offers=offers, noise=0.03)) > 0.975


def test_asking_for_empty_drafts_is_given_up_where_it_costs() -> None:
    """A model that always stops before its first token runs a pass for nothing; an ask is not a
    plain step."""
    run = chain().steps(World(0.5, linear(0.0), offers=0.0, empty_s=0.2), 300)
    assert run.asked[-250:].count(0) > 225


# ------------------------------------------------ trees


@pytest.mark.parametrize("nodes", [0.005, 0.02, 0.08])
@pytest.mark.parametrize("shape", ["logarithm", "saturating", "poor"])
def test_trees_of_the_best_size(shape: str, nodes: float) -> None:
    """Kept nodes grow with the size, ever more slowly: neither the smallest nor the largest, and no
    size for ever."""
    curve = {
        "logarithm": lambda n: 0.7 * math.log2(1 + n),
        "saturating": lambda n: 3 * (1 - 0.8**n),
        "poor": lambda n: 0.4 * (1 - 0.5**n),
    }[shape]
    world = World(0, linear(nodes), tree=curve, noise=0.02)
    runs = [Run(Goodput(16, trees=True), seed).steps(world, 400) for seed in range(3)]
    assert mean(run.rate for run in runs) > 0.95 * best_rate(world, TREE)


# ------------------------------------------------ mixtures of experts


@pytest.mark.parametrize("sharing", [0.5, 0.62, 0.7, 0.8])
@pytest.mark.parametrize("alphas", [(0.1, 0.2), (0.35, 0.65), (0.65, 0.65)])
def test_a_mixture_is_never_slower_than_plain_and_gains_where_it_can(
    sharing: float, alphas: tuple[float, float]
) -> None:
    """Answers of 80 tokens, hard and easy in turn, four experts two thirds of a plain pass: catches
    drafts that go on where each reads experts of its own, and those that are never begun."""

    def experts(width: int) -> float:
        return 4 * (1 + width) ** sharing

    def cost(width: int, rows: int) -> float:
        return 0.32 + 0.68 * experts(width) / 4 + 0.11 * width

    rates = []
    for seed in range(6):
        control = Goodput(8, trees=False)
        control.learn_costs(
            1, {size: cost(size, 1) for size in CHAIN}, {size: experts(size) for size in CHAIN}
        )
        run = Run(control, seed)
        for answer in range(10):
            earned = run.earned
            alpha = alphas[answer % 2]
            world = World(alpha, cost, noise=0.06, outliers=0.03, experts=experts)
            while run.earned < earned + 80:
                run.steps(world, 1)
        rates.append(run.rate)
    plain = plain_rate(World(0, cost))
    assert mean(rates) > 0.98 * plain
    if alphas == (0.65, 0.65):
        assert mean(rates) > 0.96 * best_rate(World(0.65, cost), CHAIN)


# ------------------------------------------------ the report


def test_summary_adds_up() -> None:
    """Steps counted once; regret against the best fixed length, which a mix cannot beat."""
    run = chain().steps(World(0.6, linear(0.1)), 120)
    Run(run.control, num_rows=2).steps(World(0.6, linear(0.1)), 30)
    report = run.control.summary()
    assert sum(report["chosen"].values()) == 150
    assert {rows: sum(part["chosen"].values()) for rows, part in report["by_rows"].items()} == {
        1: 120,
        2: 30,
    }
    for rows, part in report["by_rows"].items():
        rates = part["tokens_per_s"]
        best = part["best_fixed"]
        assert list(rates) == CHAIN
        assert rates[best] == max(rates.values())
        assert rates[0] == pytest.approx(rows, rel=0.01)
        assert 0 <= part["regret"] < 0.2
    assert report["by_rows"][1]["seconds"][0] == pytest.approx(1, rel=0.01)


def test_regret_is_zero_where_only_the_best_was_chosen() -> None:
    control = Goodput(1, trees=False)
    Run(control).steps(World(1.0, linear(0.0)), 50)
    chosen = control.summary()["chosen"]
    part = control.summary()["by_rows"][1]
    share = chosen.get(0, 0) / 50  # plain steps bring half the tokens in the same time
    assert part["regret"] == pytest.approx(share / 2, abs=0.01)


def test_summary_before_anything_was_measured() -> None:
    assert Goodput(4, trees=False).summary() == {"chosen": {}, "by_rows": {}}


def test_what_a_step_asked_for_is_counted_once_it_was_taken() -> None:
    """Steps are planned ahead: what was planned for a number of rows that never came again was not
    chosen."""
    control = Goodput(8, trees=False)
    run = Run(control, 0).steps(World(0.8, linear(0.05)), 150)
    assert sum(control.summary()["chosen"].values()) == sum(run.counts.values())


def test_a_crowd_never_seen_compares_sizes_as_the_nearest_one_does() -> None:
    """Given what one and eight rows cost, seven are right from the first step, however fast they
    are."""
    control = Goodput(8, trees=False)
    control.learn_costs(1, {size: 1.0 + 0.01 * size for size in CHAIN})
    control.learn_costs(8, {size: 5.0 + 4.0 * size for size in CHAIN})
    Run(control).steps(World(0.5, linear(0.01)), 50)  # half of the nodes are kept
    assert [control.next_size(7, {Phase(): 1.0}, 7), control.settled(7)] == [0, 0]
    assert control.settled(1) > 2


def test_costs_are_made_once_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them takes as long as a tenth of a small model's step."""
    made: list[int] = []
    monkeypatch.setattr(
        goodput, "LengthCosts", lambda max_nodes: made.append(max_nodes) or LengthCosts(max_nodes)
    )
    chain().steps(World(0.5, linear(0.01)), 100)
    assert made == [8]


def test_a_tree_that_says_which_node_came_when_is_known_at_every_size() -> None:
    """Two kept of eight, always the first two: two is best, though nothing but eight was ever asked
    for."""
    control = Goodput(8, trees=True)
    control.learn_costs(1, {size: 1 + 0.05 * size for size in range(9)})
    verdict = VerdictLists([[0, 1]], [2], [0], [False])
    for _ in range(40):
        control.learn(
            ObservedStep(1, 8, [8], [8], verdict, [[*range(1, 9)]], 1.4, [0], [Phase()], 9)
        )
    assert control.summary()["by_rows"][1]["best_fixed"] == 2


def test_what_kept_nodes_needed_is_read_off_the_path() -> None:
    """Two rows of a draft; the second kept its third node, then its fourth."""
    verdict = VerdictLists([[0, -1, -1, -1], [2, 3, -1, -1]], [1, 2], [0, 0], [False, True])
    step = ObservedStep(
        2, 4, [4, 4], [2, 4], verdict, [[1, 4, 4, 4], [1, 2, 3, 6]], 1.0, [0, 1], [Phase()] * 2, 9
    )
    assert [step.kept_budgets(row) for row in (0, 1)] == [[1], [3, 6]]
    assert step._replace(budgets=[None, [1, 2, 3, 6]]).kept_budgets(0) is None
    assert step._replace(budgets=None).kept_budgets(1) is None


def test_a_tree_that_does_not_say_has_not_lost_its_nodes() -> None:
    """One row's drafter says which node came when, another's does not: that is no news of nodes
    that were not kept."""
    control = Goodput(8, trees=True)
    control.learn_costs(2, {size: 1 + 0.05 * size for size in range(9)})
    verdict = VerdictLists([[0, 1], [0, 1]], [2, 2], [0, 0], [False, False])
    for _ in range(40):
        control.learn(
            ObservedStep(
                2, 8, [8, 8], [8, 8], verdict, [[*range(1, 9)], None], 1.4, [0, 1], [Phase()] * 2, 9
            )
        )
        control.learn(
            ObservedStep(2, 8, [8, 8], [8, 8], verdict, None, 1.4, [0, 1], [Phase()] * 2, 9)
        )
    # half as much kept: 2.9
    assert control.summary()["by_rows"][2]["tokens_per_s"][8] == pytest.approx(2 * 3 / 1.4, rel=0.1)


def test_the_steadier_a_run_the_more_steps_are_planned_at_once() -> None:
    """Catches a control that thinks in every step."""
    control = Goodput(8, trees=False)
    run = Run(control).steps(World(0.95, linear(0.1)), 16)
    assert control.lessons >= 4
    run.steps(World(0.95, linear(0.1)), 320)
    before = control.lessons
    run.steps(World(0.95, linear(0.1)), 10 * MAX_PLAN)
    assert control.lessons - before == 10


def test_probes_become_rarer_while_they_change_nothing() -> None:
    """One node where drafting does not pay: again and again, but ever more rarely."""
    run = chain().steps(World(0.02, linear(0.3)), 900)
    early, late = (
        [step for step in steps if run.asked[step]] for steps in (range(20, 120), range(500, 900))
    )
    assert 3 <= len(late) < 2 * len(early)


def test_nodes_of_a_mixture_have_prices() -> None:
    """What the time of verifying them would bring otherwise; of other targets nodes have none."""
    dense, mixture = (Goodput(4, trees=True) for _ in range(2))
    seconds = {size: 1.0 + 0.2 * size for size in range(5)}
    dense.learn_costs(1, seconds)
    mixture.learn_costs(1, seconds, {size: 4.0 + 2 * size for size in range(5)})
    for control in (dense, mixture):
        control.next_size(1, {Phase(): 1.0}, 0)
    assert dense.prices(1) == []
    rates = mixture.goodput(1)
    assert rates is not None
    assert mixture.prices(1) == pytest.approx(
        [0.2 * size * max(rates) for size in range(5)], rel=0.15
    )
