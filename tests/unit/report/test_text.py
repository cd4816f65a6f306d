"""Lines and JSON."""

from __future__ import annotations

import json
import math

import pytest

from outrider.report.text import amount, figure, printable, stats_line, to_json, with_interval
from outrider.stats import DecodeStats


def test_printable_disarms_the_terminal() -> None:
    """A model can write escape sequences; a terminal must not obey them."""
    assert printable("a\x1b[2Jb\tc\nd\x9b") == "a\ufffd[2Jb\tc\nd\ufffd"


def test_json_is_strict() -> None:
    assert json.loads(to_json({"a": float("inf"), "b": [float("nan"), 1.5], "c": ("x",)})) == {
        "a": None,
        "b": [None, 1.5],
        "c": ["x"],
    }


@pytest.mark.parametrize(
    ("size", "text"),
    [(10, "10 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 42, "4096.0 GiB")],
)
def test_amount(size: int, text: str) -> None:
    assert amount(size) == text


def test_stats_line_without_drafts_has_no_ratios() -> None:
    """Plain decoding has no acceptance to speak of."""
    stats = DecodeStats(ttft_s=1.0, decode_s=0.5)
    for _ in range(4):
        stats.count_step(0, 0, 1, rejected=False)
    assert (
        stats_line(stats)
        == "4 tokens in 1.50 s · first token after 1.00 s · then 6 tokens/s (166.7 ms per token)"
    )


def test_reading_the_prompt_is_no_part_of_the_speed() -> None:
    """64 tokens, 5 of them in the first step, 0.35 s and 0.32 s: 59 tokens are decoded in 0.32 s,
    not 64 in 0.67 s."""
    stats = DecodeStats(ttft_s=0.35, decode_s=0.32)
    stats.count_step(5, 4, 5, rejected=True)
    stats.count_step(60, 58, 59, rejected=True)
    line = stats_line(stats)
    assert (
        "64 tokens in 0.67 s · first token after 0.35 s · then 184 tokens/s (5.4 ms per token)"
        in line
    )


@pytest.mark.parametrize("emitted", [1, 4])
def test_an_answer_of_one_step_has_no_decode_speed(emitted: int) -> None:
    stats = DecodeStats(ttft_s=0.25)
    stats.count_step(4, emitted - 1, emitted, rejected=False)
    assert "tokens/s" not in stats_line(stats)
    assert "first token after 0.25 s" in stats_line(stats)
    found = stats.as_dict()
    assert (found["first_tokens"], found["tpot_s"], found["decode_tokens_per_s"]) == (
        emitted,
        None,
        None,
    )


def test_parts_of_drafts_are_told() -> None:
    total = DecodeStats()
    for parts in (["eagle3", "eagle3", "ngram"], ["forced", "ngram"]):
        stats = DecodeStats()
        stats.count_step(len(parts), 2, 3, rejected=True)
        stats.count_parts(parts, [0, 1])
        total = total.merge(stats)
    assert total.as_dict()["parts"] == {
        "eagle3": {"steps": 1, "drafted": 2, "accepted": 2},
        "ngram": {"steps": 2, "drafted": 2, "accepted": 1},
        "forced": {"steps": 1, "drafted": 1, "accepted": 1},
    }
    assert "accepted of drafted: eagle3 2 of 2, ngram 1 of 2, forced 1 of 1" in stats_line(total)


def test_nothing_emitted_has_no_times() -> None:
    assert stats_line(DecodeStats(), "abort") == "0 tokens in 0.00 s · stopped by you"


def test_times_of_several_answers_are_per_answer() -> None:
    """`/stats` of a chat: the time to first token is a mean, the speed that of all tokens behind
    first steps."""
    total = DecodeStats()
    for ttft_s in (0.2, 0.4):
        stats = DecodeStats(ttft_s=ttft_s, decode_s=0.5)
        stats.count_step(3, 2, 3, rejected=True)
        stats.count_step(3, 3, 4, rejected=False)
        total = total.merge(stats)
    assert (total.answers, total.first_tokens, total.decode_tokens) == (2, 6, 8)
    assert (
        "14 tokens in 1.60 s · first token after 0.30 s on average · then 8 tokens/s (125.0 ms per token)"
        in stats_line(total)
    )


@pytest.mark.parametrize(
    ("value", "measured"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (1.5, "1.50"),
        (0.01234, "0.0123"),
        (48.06, "48.1"),
        (1234.6, "1235"),
        (1e9, "1e+09"),
        (2.34e-7, "2.34e-07"),
        (-0.5, "-0.500"),
        (None, "-"),
        (math.inf, "-"),
        (4096, "4096"),
        (100, "100"),
    ],
)
def test_how_numbers_are_written(value: float | None, measured: str) -> None:
    assert figure(value) == measured


def test_intervals_end_at_the_same_decimal() -> None:
    assert with_interval(1.5, 1.4, 1.613) == "1.50 [1.40, 1.61]"
    assert with_interval(1.0, 0.9512, 1.05) == "1.00 [0.95, 1.05]"
    assert with_interval(0.0, -0.0123, 0.02) == "0.0000 [-0.0123, 0.0200]"
    assert with_interval(3.0, None, None) == "3"
    assert with_interval(2.0, 0.0, None) == "2.00 [0.00, -]"
    assert with_interval(None, 1.0, 2.0) == "-"


def test_experts_are_told_where_they_are_known() -> None:
    stats = DecodeStats(ttft_s=0.25)
    stats.count_step(4, 2, 3, rejected=True)
    assert "experts" not in stats_line(stats)
    assert stats.as_dict()["experts_per_pass"] is None
    stats.experts = 12.5
    twice = stats.merge(stats)
    assert twice.as_dict()["experts_per_pass"] == 12.5
    assert "12.50 experts of a layer per pass" in stats_line(twice)
