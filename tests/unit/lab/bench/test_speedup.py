"""Speedups and their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.lab.bench.notes import notes_of, pair
from outrider.lab.bench.summary import TimedPair, samples, speedup
from tests.unit.lab.bench.fakes import trace_of


def drawn(
    num_prompts: int, rounds: int, *, between: float, within: float, seed: int = 0
) -> list[TimedPair]:
    """Log ratios with a spread between prompts and one between the rounds of a prompt, around a
    speedup of 2."""
    random = np.random.default_rng(seed)
    offsets = random.normal(0, between, num_prompts)
    return [
        TimedPair(prompt, 2 * math.exp(offset + random.normal(0, within)), 1.0)
        for prompt, offset in enumerate(offsets)
        for _ in range(rounds)
    ]


def test_every_prompt_counts_once_however_many_rounds_it_had() -> None:
    """Three rounds of a prompt with speedup 1 do not outweigh one round of a prompt with speedup 3."""
    found = speedup([*[TimedPair(0, 1.0, 1.0)] * 3, TimedPair(1, 3.0, 1.0)])
    assert found is not None
    assert found.value == pytest.approx(2.0)


def test_long_prompts_weigh_by_their_seconds() -> None:
    found = speedup([TimedPair(0, 10.0, 5.0), TimedPair(1, 1.0, 1.0)])
    assert found is not None
    assert found.value == pytest.approx(11 / 6)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """95 % of intervals would hold 2 with many prompts; 24 prompts and percentiles are a little
    short of that."""
    hits = 0
    for seed in range(100):
        found = speedup(drawn(24, 1, between=0.2, within=0.1, seed=seed))
        assert found is not None
        truth = 2 * math.exp((0.2**2 + 0.1**2) / 2)  # mean of the ratios
        hits += found.low <= truth <= found.high
    assert 84 <= hits <= 100


def test_one_prompt_has_no_interval() -> None:
    found = speedup([TimedPair(0, 2.0, 1.0)] * 5)
    assert found is not None
    assert not found.is_known
    assert not found.low > 1


def test_prompts_of_one_batch_are_one_witness() -> None:
    """Two rows that shared every step have the same times: that is no precision."""
    together = [TimedPair(prompt, 2.0, 1.0, group=(0, 0)) for prompt in range(4)]
    found = speedup(together)
    assert found is not None
    assert (found.value, found.is_known) == (2.0, False)
    later = [TimedPair(prompt, 3.0, 1.0, group=(1, 0)) for prompt in range(4)]
    found = speedup([*together, *later])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((2.0, 3.0)), "every prompt's mean is 2.5"


def test_nothing_to_compare() -> None:
    assert speedup([]) is None


def test_pairs_without_common_tokens_are_left_out_of_decoding_only() -> None:
    plain = [trace_of([1, 1], [0.5, 0.01]), trace_of([1] * 5, [0.5] + [0.01] * 4)]
    own = [trace_of([2], [0.6]), trace_of([2, 3], [0.6, 0.02])]
    notes = [
        notes_of([mine], 1, [number], 0, 1)[0].model_copy(update={"pairing": pair(theirs, mine)})
        for number, (theirs, mine) in enumerate(zip(plain, own, strict=True))
    ]
    (decode,) = samples(notes)
    assert (decode.prompt, decode.plain_s, decode.own_s) == pytest.approx((1, 0.03, 0.02))
    whole = samples(notes, end_to_end=True)
    assert [(one.plain_s, one.own_s) for one in whole] == [
        pytest.approx((0.51, 0.6)),
        pytest.approx((0.54, 0.62)),
    ]
    assert samples(notes_of([plain[0]], 0, [0], 0, 1)) == []
