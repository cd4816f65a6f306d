"""Numbers of one level, and of one server against another, from made-up answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lab.server.counters import CounterWindow
from outrider.lab.server.summary import MIN_PAIRS, busy_seconds, compare, percentiles, summarise
from outrider.lab.server.types import Level, LevelMeasurement, MeasuredAnswer, SpeculationCounts

ONE = Level(concurrency=1)


def answer(
    name: int, seconds: float = 1.0, tokens: int | None = 10, text: str = "same", window: int = 0, start: float = 0.0
) -> MeasuredAnswer:
    return MeasuredAnswer(
        id=str(name),
        chunks_s=[0.2, seconds],
        seconds=seconds,
        text=text,
        num_tokens=tokens,
        window=window,
        start_s=start,
    )


def level(*answers: MeasuredAnswer, window: CounterWindow | None = None) -> LevelMeasurement:
    return summarise(ONE, len(answers), answers, [], window)


def test_latencies_of_one_answer() -> None:
    one = answer(1, seconds=2.0, tokens=10)
    assert one.ttft_s == 0.2
    assert one.tpot_s == pytest.approx(1.8 / 9)
    assert one.gaps_s == [1.8]
    assert answer(1, tokens=1).tpot_s is None
    silent = MeasuredAnswer(id="1", chunks_s=[], seconds=0.5, text="", num_tokens=1)
    assert (silent.ttft_s, silent.tpot_s, silent.gaps_s) == (None, None, [])


def test_busy_time_is_the_sum_of_windows() -> None:
    """Between windows another server works, or the run was interrupted; within one, requests overlap."""
    answers = [answer(1, 1.0, start=0.0), answer(2, 1.0, start=0.5), answer(3, 2.0, window=1, start=0.25)]
    assert busy_seconds(answers) == pytest.approx(1.5 + 2.0)
    measured = level(*answers)
    assert measured.tokens_per_s == pytest.approx(30 / 3.5)
    assert measured.requests_per_s == pytest.approx(3 / 3.5)


def test_one_uncounted_answer_makes_rates_unknown() -> None:
    measured = level(answer(1), answer(2, tokens=None))
    assert measured.tokens_per_s is None
    assert measured.tpot_s is not None
    assert measured.tpot_s.n == 1


def test_percentiles() -> None:
    found = percentiles([float(n) for n in range(1, 102)])
    assert found is not None
    assert (found.n, found.mean, found.p50, found.p90, found.p99) == (101, 51.0, 51.0, 91.0, 100.0)
    assert percentiles([None]) is None


def test_tokens_of_others_are_noticed() -> None:
    answers = [answer(n, window=n) for n in range(3)]
    for generated, is_reported in ((40, True), (30, False)):
        measured = level(*answers, window=CounterWindow(speculation=SpeculationCounts(num_steps=3), num_generated=generated))
        assert any("other traffic" in note for note in measured.notes) is is_reported


def test_speedup_is_a_ratio_of_sums() -> None:
    """Not a mean of ratios, which short requests would rule."""
    base = level(answer(1, 1.0, 10), answer(2, 9.0, 90))
    other = level(answer(1, 0.1, 10), answer(2, 9.0, 90))
    compared = compare(base, other, greedy=True)
    assert compared.speedup is not None
    assert compared.speedup.value == pytest.approx((100 / 9.1) / (100 / 10))
    assert not compared.speedup.is_known, "two pairs are too few"


def test_speedup_over_different_numbers_of_tokens() -> None:
    compared = compare(level(answer(1, 2.0, 10)), level(answer(1, 2.0, 20)), greedy=False)
    assert compared.speedup is not None
    assert compared.speedup.value == pytest.approx(2.0)
    assert compared.num_identical is None


def test_without_token_counts_the_same_text_is_as_many_tokens() -> None:
    """Texts that differ may differ in length: they are left out."""
    base = level(answer(1, 2.0, None), answer(2, 4.0, None), answer(3, 8.0, None))
    other = level(answer(1, 1.0, None), answer(2, 1.0, None), answer(3, 100.0, None, text="else"))
    compared = compare(base, other, greedy=True)
    assert compared.speedup is not None
    assert compared.speedup.value == pytest.approx(6.0 / 2.0)
    assert compared.throughput_ratio is None
    empty = compare(level(answer(1, 2.0, None, text="")), level(answer(1, 1.0, None, text="")), greedy=True)
    assert empty.speedup is None


def test_with_token_counts_texts_do_not_matter() -> None:
    base = level(answer(1, 2.0, 10), answer(2, 4.0, None))
    other = level(answer(1, 1.0, 20, text="else"), answer(2, 1.0, None))
    speedup = compare(base, other, greedy=True).speedup
    assert speedup is not None
    assert speedup.value == pytest.approx(4.0)


def test_streams_that_were_held_back_are_noticed() -> None:
    """A token every 0.1 ms, or 32 tokens in two chunks: no model did that. 15 tokens may be one long step."""

    def one(tokens: int, *chunks_s: float) -> list[str]:
        return level(
            MeasuredAnswer(id="1", chunks_s=list(chunks_s), seconds=chunks_s[-1], text="a", num_tokens=tokens),
            answer(2, tokens=10),
        ).notes

    assert any("1 of 2 answers came nearly at once" in note for note in one(31, 1.0, *[1.0 + 0.0001 * n for n in range(1, 31)]))
    assert any("nearly at once" in note for note in one(32, 0.5, 1.0))
    assert one(31, *[1.0 + 0.001 * n for n in range(31)]) == []
    assert one(31, 0.5, 1.0) == []
    assert one(15, 1.0) == []


def test_only_requests_that_both_answered_count() -> None:
    base = level(answer(1, 1.0), answer(2, 100.0))
    other = level(answer(3, 7.0), answer(1, 0.5, text="else"))
    compared = compare(base, other, greedy=True)
    assert (compared.num_pairs, compared.num_identical) == (1, 0)
    assert compared.speedup is not None
    assert compared.speedup.value == pytest.approx(2.0)
    empty = compare(level(), other, greedy=True)
    assert (empty.num_pairs, empty.speedup, empty.throughput_ratio, empty.num_identical) == (0, None, None, 0)


def test_the_interval_covers_what_varies() -> None:
    """Pairs with the same ratio leave no doubt; pairs that differ do."""
    base = level(*(answer(n, 1.0 + n) for n in range(MIN_PAIRS)))
    twice = level(*(answer(n, (1.0 + n) / 2) for n in range(MIN_PAIRS)))
    certain = compare(base, twice, greedy=True).speedup
    assert certain is not None
    assert (certain.low, certain.high) == pytest.approx((2.0, 2.0))
    mixed = level(*(answer(n, (1.0 + n) / (1 + n % 3)) for n in range(MIN_PAIRS)))
    doubtful = compare(base, mixed, greedy=True).speedup
    assert doubtful is not None
    assert 1.0 <= doubtful.low < doubtful.value < doubtful.high <= 3.0


@given(st.text(max_size=6), st.text(max_size=6))
def test_the_first_difference(left: str, right: str) -> None:
    compared = compare(level(answer(1, text=left)), level(answer(1, text=right)), greedy=True)
    assert compared.num_identical == (left == right)
    for difference in compared.differences:
        cut = difference.position
        assert left[:cut] == right[:cut]
        assert left[cut : cut + 1] != right[cut : cut + 1]
        assert (difference.baseline, difference.other) == (left[cut:], right[cut:])
