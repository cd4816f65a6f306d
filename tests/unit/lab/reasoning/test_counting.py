"""Shares, survival, acceptance by kind, forecasts and reasons, on columns written by hand."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import binomtest

from outrider.lab.estimate.curves import StepCosts
from outrider.lab.reasoning.acceptance import ALL, FEWEST, by_kind, counts
from outrider.lab.reasoning.estimates import best_of, estimate_lengths, replayed_tau
from outrider.lab.reasoning.ideas import ideas
from outrider.lab.reasoning.rejections import DOUBT, NEAR_TIE, SECOND_GUESS, SURE, rejections
from outrider.lab.reasoning.shares import proportion, ratio, survival_curve
from outrider.sampling.theory import predicted_speedup
from tests.unit.lab.reasoning.solutions import LETTERS, guessed, solved

# ---------------------------------------------------------------- shares


def test_shares_of_problems() -> None:
    found = proportion([1, 9, 0], [2, 10, 0])
    assert found is not None
    assert found.value == 10 / 12
    assert found.low == pytest.approx(0.5)  # a resample of the first problem alone
    assert proportion([0, 0], [0, 0]) is None
    one = ratio([6], [2], least=1.0, most=9.0)
    assert one is not None
    assert (one.value, one.low, one.high) == (3.0, 1.0, 9.0)  # one problem says nothing about others


@pytest.mark.parametrize("kept", [0, 30])
def test_shares_of_0_and_1_are_not_certain(kept: int) -> None:
    """Resampling problems that are all alike would give an interval without width."""
    found = proportion([kept // 3] * 3, [10] * 3)
    exact = binomtest(kept, 30).proportion_ci(0.95, method="exact")
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(exact.low), pytest.approx(exact.high))
    assert found.value == kept / 30


def test_survival_is_a_product_of_what_came_there() -> None:
    kept, reached = np.array([[4, 2, 1], [2, 1, 0]]), np.array([[5, 4, 2], [5, 2, 0]])
    found = survival_curve(kept, reached)
    assert [one.value for one in found] == pytest.approx([0.6, 0.6 * 3 / 6, 0.6 * 0.5 * 1 / 2])
    assert all(one.low <= one.value <= one.high for one in found)
    assert found[0].low == pytest.approx(0.4)
    assert found[0].high == pytest.approx(0.8)


def test_survival_ends_where_no_draft_came() -> None:
    assert len(survival_curve(np.array([[1, 0, 0]] * 2), np.array([[2, 1, 0]] * 2))) == 2
    assert survival_curve(np.zeros((2, 3), dtype=int), np.zeros((2, 3), dtype=int)) == []
    sure = survival_curve(np.array([[5], [5]]), np.array([[5], [5]]))[0]
    assert sure.value == 1
    assert sure.low == pytest.approx(0.025 ** (1 / 10))


# ---------------------------------------------------------------- acceptance

TEXT = [("kkr", "dda"), ("kr", "aa"), ("kkkb", "adcc")]


def test_tokens_count_by_their_own_kind_and_steps_by_their_first() -> None:
    found = {one.kind: one for one in by_kind([solved(TEXT), solved([("r", "r")])], 3)}
    assert list(found) == [ALL, *(LETTERS[letter] for letter in "darc")]
    every = found[ALL]
    assert (every.tokens, every.tested, every.kept, every.starts) == (10, 9, 6, 4)
    arithmetic = found[LETTERS["a"]]  # kept: positions 3, 5; rejected: 2 (at depth 3) and 4
    assert (arithmetic.tokens, arithmetic.tested, arithmetic.kept, arithmetic.starts) == (4, 4, 2, 2)
    assert [one.value for one in arithmetic.survival] == [1.0, 0.5, 0.5]  # kr and kkkb
    decomposition = found[LETTERS["d"]]
    assert (decomposition.tested, decomposition.kept, decomposition.starts) == (3, 3, 1)
    assert [one.value for one in decomposition.survival] == [1.0, 1.0, 0.0]  # kkr
    assert found[LETTERS["c"]].starts == 0
    assert found[LETTERS["c"]].survival == []
    assert found[LETTERS["r"]].alpha is not None
    assert found[LETTERS["r"]].alpha.value == 0  # type: ignore[union-attr]


def test_positions_in_the_draft() -> None:
    text = solved(TEXT)
    kept, tested = counts([text], [np.ones(9, dtype=bool)], 4)
    assert kept.tolist() == [[3, 2, 1, 0]]
    assert tested.tolist() == [[3, 3, 2, 0]]
    many = by_kind([text] * FEWEST, 4)[0]
    assert many.by_position == [1.0, 2 / 3, 0.5, None]
    few = by_kind([text] * 3, 4)[0]  # 9 tests at most
    assert few.by_position == [None] * 4


def test_overlap_is_of_all_positions() -> None:
    found = by_kind([solved([("kr", "da")], tv=[0.2, 0.6])], 2)
    assert [one.overlap for one in found] == pytest.approx([0.6, 0.8, 0.4])
    assert by_kind([solved([("kr", "da")])], 2)[0].overlap is None


# ---------------------------------------------------------------- estimates


def brute_steps(agrees: str, gamma: int) -> list[int]:
    """Tokens that each greedy step takes."""
    taken, at = [], 0
    while at < len(agrees):
        kept = 0
        while kept < gamma and at + kept < len(agrees) and agrees[at + kept] == "1":
            kept += 1
        taken.append(min(kept + 1, len(agrees) - at))
        at += taken[-1]
    return taken


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
def test_replay_is_a_walk(gamma: int) -> None:
    texts = ["".join(word) for word in product("01", repeat=6)]
    steps = [brute_steps(text, gamma) for text in texts]
    tau, behind = replayed_tau([guessed(text) for text in texts], gamma)
    assert tau == pytest.approx(sum(map(sum, steps)) / sum(map(len, steps)))
    later = [step for one in steps for step in one[1:]]
    assert behind == pytest.approx(sum(later) / len(later))


def test_replay_of_texts_of_one_step() -> None:
    assert replayed_tau([guessed("11")], 4) == (2.0, 1.0)


def test_three_estimates() -> None:
    costs = StepCosts.of_steps({0: 0.010, 1: 0.012, 2: 0.014, 3: 0.016})
    walks = [guessed("0111" * 25)]
    found = estimate_lengths(0.75, 0.1, [0.8, 0.7, 0.6], walks, costs, 3)
    assert [one.num_draft_tokens for one in found] == [0, 1, 2, 3]
    assert found[0].replay_speedup == found[0].survival_speedup == found[0].alpha_speedup == 1
    assert found[2].alpha_speedup == predicted_speedup(0.75, 2, 0.1)
    assert found[3].survival_tau == pytest.approx(3.1)
    assert found[3].survival_speedup == pytest.approx(3.1 / 1.6)
    steps = brute_steps("0111" * 25, 3)
    assert found[3].replay_tau == pytest.approx(100 / len(steps))
    assert found[3].replay_speedup == pytest.approx(sum(steps[1:]) / (len(steps) - 1) / 1.6)
    assert found[1].step_s == pytest.approx(0.012)


def test_the_best_length_may_be_none() -> None:
    dear = StepCosts.of_steps({0: 0.01, 1: 0.05, 2: 0.09})
    found = estimate_lengths(0.9, 0.1, [0.9, 0.8], [guessed("1" * 40)], dear, 2)
    assert best_of(found) == 0
    assert best_of(found, least=1) in (1, 2)
    flat = StepCosts.of_steps({0: 0.01, 1: 0.01, 2: 0.01})
    assert best_of(estimate_lengths(0.9, 0.1, [0.9, 0.8], [guessed("0" * 40)], flat, 2)) == 0  # ties: fewer tokens


# ---------------------------------------------------------------- rejections


class Words:
    """A tokenizer."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return f"w{tokens[0]}"


def reasons_of(**columns: float) -> str:
    found = rejections([solved([("r", "a")], **{name: [value] for name, value in columns.items()})], Words(), greedy=True)
    return next(reason for reason, count in found[0].reasons.items() if count)


def test_reasons_in_their_order() -> None:
    """What fits several is told by the first."""
    assert reasons_of(p_token=0.4, p_draft=0.2, rank_token=2, q_draft=0.3) == NEAR_TIE
    assert reasons_of(p_token=0.4, p_draft=0.19, rank_token=3, q_draft=0.3) == SECOND_GUESS
    assert reasons_of(p_token=0.4, p_draft=0.19, rank_token=4, q_draft=0.49) == DOUBT
    assert reasons_of(p_token=0.4, p_draft=0.19, rank_token=4, q_draft=0.5) == SURE


def test_rejections_by_kind() -> None:
    columns = {"draft": [1, 7, 7, 7, 5, 7], "token": [1, 8, 8, 9, 5, 8], "p_entropy": [0.1, 1, 2, 3, 0.3, 4]}
    text = solved([("kr", "aa"), ("r", "a"), ("r", "d"), ("kr", "aa")], **columns)
    text.text.annotated.ledger.parts[1, 0] = 2.5
    found = {one.kind: one for one in rejections([text], Words(), greedy=False)}
    assert list(found) == [ALL, LETTERS["d"], LETTERS["a"]]
    assert (found[ALL].count, found[LETTERS["a"]].count, found[LETTERS["d"]].count) == (4, 3, 1)
    assert found[LETTERS["a"]].reasons == {}  # drawn tokens have exact causes
    assert found[LETTERS["a"]].lost == {"draft": 2.5}
    assert found[LETTERS["d"]].lost == {}
    assert [(pair.draft, pair.text, pair.count) for pair in found[LETTERS["a"]].confusions] == [("w7", "w8", 3)]
    assert found[LETTERS["d"]].confusions == []  # once is chance
    assert found[LETTERS["a"]].target_entropy == pytest.approx((1 + 2 + 4) / 3)
    assert found[LETTERS["a"]].target_entropy_kept == pytest.approx(0.2)
    assert found[LETTERS["a"]].draft_entropy is None


def test_nothing_rejected() -> None:
    found = rejections([solved([("kb", "aa")])], Words(), greedy=True)
    assert [(one.kind, one.count, one.target_entropy) for one in found] == [(ALL, 0, None)]


# ---------------------------------------------------------------- ideas


def test_ideas_can_all_be_built() -> None:
    for temperature, layers, own in product((0.0, 1.0), (1, 2, 4, 32), (True, False)):
        found = ideas(temperature, 5, 12, layers, own_weights=own)
        labels = [one.configuration.label for one in found]
        assert len(set(labels)) == len(labels)
        assert all(one.what for one in found)
        for one in found:
            one.configuration.parts()  # raises what does not fit
            exit_layer = one.configuration.drafter_options.get("exit_layer")
            assert exit_layer is None or 1 <= int(exit_layer) < layers
        assert any("early-exit" in label or "quantised" in label for label in labels) == (own and temperature == 0)


def test_interval_ends_are_finite() -> None:
    """A result is JSON, which has no infinity."""
    for found in (proportion([1], [2]), proportion([0], [2])):
        assert found is not None
        assert math.isfinite(found.high)
        assert math.isfinite(found.low)
