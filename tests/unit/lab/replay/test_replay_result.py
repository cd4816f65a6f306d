"""Sums, intervals and predicted speedups of replays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.configuration import Configuration
from outrider.lab.predict import CostPoints, StepCosts
from outrider.lab.replay.replay import MIN_BLOCKS, block_length, ratio_interval, replay, summarise
from outrider.lab.replay.replay_result import ReplayResult
from outrider.lab.replay.texts import Text

PERIOD = [2, 3, 4, 5, 6, 7]
TEXTS = [
    Text([1, *PERIOD], PERIOD[: 3 + n % 3] * 3, task="even" if n % 2 == 0 else "odd")
    for n in range(12)
]
FLAT = StepCosts.of_steps({0: 0.01, 8: 0.01})
STEEP = StepCosts(target=CostPoints.of({1: 0.010, 2: 0.015, 9: 0.050}), draft_s_per_token=0.001)


def test_tasks_add_up() -> None:
    """Catches a text counted twice or under another task, and ratios of means instead of sums."""
    found = summarise(replay(TEXTS, Configuration("ngram")), TEXTS)
    assert set(found.by_task) == {"even", "odd"}
    for name in ("num_texts", "steps", "emitted", "drafted", "tested", "accepted"):
        assert getattr(found.overall, name) == sum(
            getattr(part, name) for part in found.by_task.values()
        )
    whole = found.overall
    assert (whole.num_texts, whole.emitted) == (12, sum(len(text.answer) for text in TEXTS))
    assert whole.tau.value == whole.emitted / whole.steps > 1.5
    assert whole.alpha == whole.accepted / whole.tested
    assert whole.draft_utilisation == whole.accepted / whole.drafted
    assert whole.speedup is None
    assert whole.tau.low < whole.tau.value < whole.tau.high < float("inf")
    assert (found.configuration, found.drafter, found.learns) == ("ngram", "ngram", False)


def test_speedup_is_what_steps_cost() -> None:
    """Catches a pass taken one token too short, plain steps priced as drafting ones, and drafting
    charged twice."""
    found = replay(TEXTS, Configuration.parse("ngram k=4"))
    flat = summarise(found, TEXTS, FLAT).overall.speedup
    assert flat is not None
    assert flat.value == pytest.approx(found.total.tau)
    # pass over width + 1 tokens, 1 ms a draft token
    seconds = {0: 0.010, 1: 0.016, 2: 0.022, 3: 0.028, 4: 0.034}
    widths = sum((text.widths for text in found.texts), Counter[int]())
    assert widths[0]
    assert widths[4]
    paid = sum(seconds[width] * count for width, count in widths.items())
    speedup = summarise(found, TEXTS, STEEP).overall.speedup
    assert speedup is not None
    assert speedup.value == pytest.approx(found.total.emitted * 0.010 / paid)
    assert speedup.low < speedup.value < speedup.high < float("inf")


def test_steps_beyond_the_costs_are_counted() -> None:
    """Catches a prediction far outside of what was measured that does not say so."""
    found = replay(TEXTS, Configuration.parse("ngram k=4"))
    narrow = StepCosts.of_steps({0: 0.01, 3: 0.02})
    assert (
        summarise(found, TEXTS, narrow).outside_costs
        == sum(text.widths[4] for text in found.texts)
        > 0
    )
    assert summarise(found, TEXTS, FLAT).outside_costs == 0


def test_results_keep_what_they_are_given() -> None:
    """Catches numbers that do not survive the file, and two with one label."""
    found = [
        summarise(replay(TEXTS, Configuration.parse(label)), TEXTS, FLAT)
        for label in ("ngram k=2", "suffix", "none")
    ]
    result = ReplayResult(
        workload="w",
        tokenizer="t",
        num_texts=12,
        num_tokens=9,
        skipped=[],
        costs=FLAT,
        configurations=found,
    )
    assert ReplayResult.model_validate_json(result.model_dump_json()) == result
    labels = [one.label for one in result.comparable()]
    assert labels[:3] == ["ngram k=2: tau", "ngram k=2: predicted speedup", "ngram k=2 (even): tau"]
    assert len(labels) == len(set(labels)) == 3 * 2 * 3
    few = replace(TEXTS[0])
    alone = summarise(replay([few], Configuration("ngram")), [few])
    assert not alone.overall.tau.is_known
    lonely = result.model_copy(update={"configurations": [alone]}).comparable()
    assert [
        (one.value.low, one.value.high) for one in lonely if not isinstance(one.value, float)
    ] == [(0.0, float("inf"))]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=MIN_BLOCKS, max_size=40)
)
def test_intervals_hold_their_value(sums: list[tuple[int, int]]) -> None:
    """Catches numerators and denominators drawn apart, and blocks that lose texts."""
    above = [float(a) for a, _ in sums]
    below = [float(b) for _, b in sums]
    whole = ratio_interval(above, below, blocks=False)
    assert whole.value == pytest.approx(sum(above) / sum(below))
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    assert min(ratios) - 1e-9 <= whole.low <= whole.high <= max(ratios) + 1e-9
    blocked = ratio_interval(above, below, blocks=True)
    assert blocked.value == pytest.approx(whole.value)
    assert blocked.is_known != (len(range(0, len(sums), block_length(len(sums)))) < MIN_BLOCKS)


def test_blocks_see_what_neighbours_share() -> None:
    """Catches texts resampled one by one where they rise and fall together: the interval would be
    too narrow."""
    above = [10.0 if (index // 30) % 2 else 20.0 for index in range(1000)]
    below = [10.0] * 1000
    single = ratio_interval(above, below, blocks=False)
    blocks = ratio_interval(above, below, blocks=True)
    assert blocks.high - blocks.low > 2 * (single.high - single.low)
