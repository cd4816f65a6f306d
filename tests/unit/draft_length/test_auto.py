"""A control for each drafter: who learns what from a mixed batch."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from outrider.draft_length import AutoLength, Goodput
from outrider.draft_length.goodput import ObservedStep
from outrider.draft_length.survival import Phase
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from outrider.sampling.thinking import ThinkingMarks
from outrider.step import StepFacts
from outrider.types import VerdictLists
from tests.helpers import make_row
from tests.unit.draft_length.simulator import Batch, _draft, _verdict

SECONDS = {"model": lambda width: 1 + 0.05 * width, "copy": lambda width: 1 + 0.01 * width}


def control() -> AutoLength:
    return AutoLength({"model": Goodput(8, trees=False), "copy": Goodput(4, trees=False)})


def rows_of(*drafters: str | None) -> list[Row]:
    rows = [make_row([0], SamplingParams(max_tokens=10**6)) for _ in drafters]
    for row, name in zip(rows, drafters, strict=True):
        row.drafter = name
        row.stats.steps = 5
    return rows


def step(
    each: AutoLength, rows: list[Row], alpha: dict[str, bool], seconds: float | None = None
) -> list[int]:
    """All that a drafter asks for is kept, or nothing."""
    asked = list(each.choose(Batch(rows)))  # type: ignore[arg-type]
    names = [row.drafter or "model" for row in rows]
    kept = [size if alpha[name] else 0 for size, name in zip(asked, names, strict=True)]
    cost = (
        max(SECONDS[name](size) for size, name in zip(asked, names, strict=True))
        if seconds is None
        else seconds
    )
    each.observe(StepFacts(rows, asked, _draft(asked), _verdict(asked, kept), cost, 0.0))  # type: ignore[arg-type]
    return asked


def test_what_a_look_up_keeps_says_nothing_of_the_model() -> None:
    """The bug this is for: look-ups that fail must not stop the draft model, whose own tokens are
    all kept."""
    each = control()
    alpha = {"model": True, "copy": False}
    for _ in range(150):
        step(each, rows_of("model"), alpha)
        step(each, rows_of("copy"), alpha)
        mixed = step(each, rows_of("copy", "model"), alpha)
    assert step(each, rows_of("model"), alpha) == [8]
    assert mixed[1] == 8
    late = [step(each, rows_of("copy"), alpha)[0] for _ in range(50)]
    assert late.count(0) > 40


def test_nobody_is_asked_for_more_than_its_own_limit() -> None:
    each = control()
    for _ in range(80):
        asked = step(each, rows_of("copy", "model"), {"model": True, "copy": True})
        assert asked[0] <= 4
    assert max(asked) <= 8


def test_the_time_of_a_mixed_step_is_nobodys() -> None:
    """Minutes per step in mixed batches: neither control may believe them."""
    each = control()
    alpha = {"model": True, "copy": True}
    for _ in range(30):
        step(each, rows_of("model", "model"), alpha)
        step(each, rows_of("copy", "copy"), alpha)
    before = {name: one.summary()["by_rows"][2]["seconds"] for name, one in each.drafters.items()}
    for _ in range(30):
        step(each, rows_of("copy", "model"), alpha, seconds=60.0)
    assert {
        name: one.summary()["by_rows"][2]["seconds"] for name, one in each.drafters.items()
    } == before
    for name, rates in ((name, one.goodput(2)) for name, one in each.drafters.items()):
        assert rates is not None
        assert rates[0] == pytest.approx(2.0, rel=0.1), name


def test_rows_with_a_number_of_their_own_are_nobodys_choice() -> None:
    """Drafting is off, or fixed: a report of what was chosen, and of what that lost, must not count
    such steps."""
    each = control()
    alpha = {"model": True, "copy": True}
    for _ in range(20):
        rows = rows_of("model", "model")
        for row, size in zip(rows, (0, 3), strict=True):
            row.draft_bound = size
            row.draft_fixed = True
        assert step(each, rows, alpha) == [0, 3]
    assert each.summary()["chosen"] == {}
    for _ in range(20):
        step(each, rows_of("model", "model"), alpha)
    assert sum(each.summary()["chosen"].values()) == 20


def test_a_mixed_step_is_a_step_of_all_its_rows() -> None:
    """A pass costs what all rows cost: catches a drafter that plans, settles or learns for its own
    rows alone."""
    told: list[tuple[str, str, object]] = []

    class Noting(Goodput):
        def next_size(self, num_rows: int, shares: Mapping[Phase, float], context: int) -> int:
            told.append((self.name, "plans", (num_rows, sum(shares.values()), context)))
            return super().next_size(num_rows, shares, context)

        def settled(self, num_rows: int) -> int:
            told.append((self.name, "settles", num_rows))
            return super().settled(num_rows)

        def learn(self, step: ObservedStep) -> None:
            told.append((self.name, "learns", (step.num_rows, step.context, list(step.rows))))
            super().learn(step)

    each = AutoLength({"model": Noting(8, trees=False), "copy": Noting(4, trees=False)})
    for name, goodput in each.drafters.items():
        goodput.name = name  # type: ignore[attr-defined]
    rows = rows_of("copy", "model", "copy", None, "copy")
    rows[0].tokens.extend([1] * 9)
    step(each, rows, {"model": True, "copy": True})
    assert sorted(told, key=str) == sorted(
        [
            ("model", "plans", (5, 1.0, 14)),
            ("model", "settles", 5),
            ("model", "learns", (5, 14, [1, 3])),
            ("copy", "plans", (5, 1.0, 14)),
            ("copy", "settles", 5),
            ("copy", "learns", (5, 14, [0, 2, 4])),
        ],
        key=str,
    )


def test_lengths_of_a_mixed_step_are_those_for_as_many_rows() -> None:
    """Drafting pays for one row and not for four: a model's only row among four drafts as little as
    four would."""
    each = AutoLength({"model": Goodput(8, trees=False), "copy": Goodput(4, trees=False)})
    for rows, step_s in ((1, 0.01), (4, 2.0)):
        each.drafters["model"].learn_costs(rows, {size: 1 + step_s * size for size in range(9)})
    mixed = rows_of("model", "copy", "copy", "copy")
    alone = rows_of("model")
    drafted = {1: [0, 0], 4: [0, 0]}
    for _ in range(100):
        for rows in (alone, mixed):
            asked = step(
                each,
                rows,
                {"model": True, "copy": False},
                seconds=1 + (0.01 if len(rows) == 1 else 2.0) * 8,
            )
            drafted[len(rows)][asked[0] > 0] += 1
    assert drafted[1][True] > 90 > 20 > drafted[4][True]


def test_rows_that_name_nobody_are_the_first_drafters() -> None:
    each = control()
    for _ in range(40):
        step(each, rows_of(None), {"model": True, "copy": False})
    assert sum(each.drafters["model"].summary()["chosen"].values()) == 40
    assert each.drafters["copy"].summary()["chosen"] == {}


def test_the_report_adds_up() -> None:
    """Lengths of all; predictions of the first drafter, as a server without others gives them; each
    one's own below."""
    each = control()
    for _ in range(20):
        step(each, rows_of("model"), {"model": True, "copy": True})
        step(each, rows_of("copy"), {"model": True, "copy": True})
    report = each.summary()
    assert sum(report["chosen"].values()) == 40
    assert report["by_rows"] == report["by_drafter"]["model"]["by_rows"]
    assert set(report["by_drafter"]) == {"model", "copy"}
    assert sum(report["by_drafter"]["copy"]["chosen"].values()) == 20


def test_the_report_has_the_seconds_of_timed_steps() -> None:
    """Against what plain steps take they say what drafts brought: steps that read prompts, and
    those of several drafters, are no part of them."""
    each = control()
    alpha = {"model": True, "copy": True}
    for _ in range(3):
        step(each, rows_of("model"), alpha, seconds=2.0)
    step(each, rows_of("copy", "model"), alpha, seconds=60.0)
    first = rows_of("model")
    first[0].stats.steps = 1
    step(each, first, alpha, seconds=60.0)
    assert each.summary()["timed_s"] == 6.0


def test_only_a_single_row_is_told_what_its_nodes_must_bring() -> None:
    """A pass of several rows is as wide as its widest. Catches prices that stay when another row
    joins."""
    mixture = Goodput(8, trees=True)
    times = {size: 1 + 0.5 * size for size in range(9)}
    mixture.learn_costs(1, times, {size: 4 * (1 + size) ** 0.7 for size in times})
    each = AutoLength({"model": mixture})
    rows = Batch(rows_of("model"))
    each.choose(rows)  # type: ignore[arg-type]
    assert rows.prices
    rows += rows_of("model")
    each.choose(rows)  # type: ignore[arg-type]
    assert not rows.prices


def test_rows_whose_texts_are_not_read_ask_for_nothing() -> None:
    """Nor do the others where too few of them are left to pay for a step with drafts; a row's own
    number stays what it is."""
    each = AutoLength({"model": Goodput(8, trees=False), "copy": Goodput(4, trees=False)})
    rows = rows_of(*["model"] * 8)
    for _ in range(200):
        asked = list(each.choose(Batch(rows)))  # type: ignore[arg-type]
        kept = [min(size, 1) for size in asked]
        seconds = 1 + 0.6 * (max(asked) > 0) + 0.05 * max(asked)
        each.observe(StepFacts(rows, asked, _draft(asked), _verdict(asked, kept), seconds, 0.0))  # type: ignore[arg-type]
    while not all(asked := list(each.choose(Batch(rows)))):  # type: ignore[arg-type]  not one of its plain checks
        each.observe(StepFacts(rows, asked, _draft(asked), _verdict(asked, [0] * 8), 1.0, 0.0))  # type: ignore[arg-type]
    assert each.drop_unready(rows, [*asked[:7], 0]) == [*asked[:7], 0]
    assert each.drop_unready(rows, [asked[0], *[0] * 7]) == [0] * 8
    rows[0].draft_bound = 3
    rows[0].draft_fixed = True
    asked = list(each.choose(Batch(rows)))  # type: ignore[arg-type]
    assert each.drop_unready(rows, [3, asked[1], *[0] * 6]) == [3, *[0] * 7]


THINKING = ThinkingMarks(
    opening=("<think>",), closing=("</think>",), opening_id=8, closing_ids=(9,), is_open=True
)


def test_thoughts_and_answers_have_lengths_of_their_own() -> None:
    """Catches one estimate for both, an estimate that fades while nobody is in that phase, a plan
    kept across the mark, drafts that count for the phase that they led to."""
    each = AutoLength({"model": Goodput(8, trees=False)})
    params = SamplingParams(max_tokens=10**6, thinking=THINKING)
    row = make_row([0], params)
    row.stats.steps = 5
    phases: list[list[int]] = []
    for number in range(6):
        asked = []
        for _ in range(60):
            easy = row.thinks
            asked += step(each, [row], {"model": easy})
            row.add(7, "plain")
        assert row.thinks == (number % 2 == 0)
        phases.append(asked)
        if row.thinks:
            row.add(9, "plain")
        else:
            row = make_row([0], params)  # the next request
            row.stats.steps = 5
    assert phases[4][:3] == [8, 8, 8]  # from the first step on
    assert max(phases[5][:3]) <= 1


def test_rows_in_both_phases_share_the_mean() -> None:
    """Three rows of four are kept whole: as many nodes as if each row were kept that often."""
    goodput = Goodput(4, trees=False)
    thought = Phase(thinks=True)
    answer = Phase()
    for phase, kept in ((thought, 4), (answer, 0)):
        verdict = VerdictLists([[*range(kept)]], [kept], [0], [True])
        for _ in range(200):
            goodput.next_size(1, {phase: 1.0}, 9)
            goodput.learn(ObservedStep(1, 4, [4], [4], verdict, None, 1.0, [0], [phase], 9))
    goodput.next_size(1, {answer: 1.0}, 9)
    answers = goodput.summary()["by_rows"][1]["tokens_per_s"]
    goodput.next_size(1, {thought: 1.0}, 9)
    thoughts = goodput.summary()["by_rows"][1]["tokens_per_s"]
    goodput.next_size(1, {answer: 0.25, thought: 0.75}, 9)
    both = goodput.summary()["by_rows"][1]["tokens_per_s"]
    assert thoughts[4] > 3 * answers[4]
    for size, rate in both.items():
        assert rate == pytest.approx(0.25 * answers[size] + 0.75 * thoughts[size])


def long_rows(*lengths: int) -> list[Row]:
    rows = [make_row([0] * length, SamplingParams(max_tokens=10**6)) for length in lengths]
    for row in rows:
        row.stats.steps = 5
    return rows


def keep(
    each: AutoLength, rows: list[Row], chance: float = 1.0, rng: random.Random | None = None
) -> list[int]:
    """Behind short texts each token is kept with this chance, behind long ones none."""
    rng, asked = rng or random.Random(0), list(each.choose(Batch(rows)))  # type: ignore[arg-type]
    kept = [
        next(
            (depth for depth in range(size) if len(row.tokens) >= 1024 or rng.random() > chance),
            size,
        )
        for size, row in zip(asked, rows, strict=True)
    ]
    each.observe(
        StepFacts(rows, asked, _draft(asked), _verdict(asked, kept), 1 + 0.1 * max(asked), 0.0)
    )  # type: ignore[arg-type]
    return asked


def test_short_and_long_texts_have_lengths_of_their_own() -> None:
    """In turn, from the first step on: catches one estimate for all, and one that fades while no
    such text is there. A length that was never seen begins with what the nearest one keeps."""
    each = AutoLength({"model": Goodput(8, trees=False)})
    short = long_rows(200)
    long = long_rows(6000)
    longer = long_rows(9000)
    for _ in range(3):
        lengths = [[keep(each, rows)[0] for _ in range(60)] for rows in (short, long)]
    assert lengths[0][:3] == [8, 8, 8]
    assert max(lengths[1][:3]) <= 1
    assert keep(each, short)[0] == 8
    assert keep(each, longer)[0] <= 1


def test_a_batch_drafts_less_the_more_of_its_rows_are_long() -> None:
    """One pass is as wide as its widest row, so all rows get the length that suits their mean."""
    each = AutoLength({"model": Goodput(8, trees=False)})
    rng = random.Random(2)
    batches = [
        long_rows(200, 300, 400, 500),
        long_rows(200, 6000, 6000, 6000),
        long_rows(*[6000] * 4),
    ]
    for _ in range(3):
        asked = [[max(keep(each, rows, 0.8, rng)) for _ in range(60)][-20:] for rows in batches]
    means = [sum(lengths) / len(lengths) for lengths in asked]
    assert means[0] > means[1] > means[2]
