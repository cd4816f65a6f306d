"""One server against a baseline, request by request: how much faster, and whether greedy texts are the same.

The speedup is that of a request: tokens per second here over tokens per second there, each a ratio of sums over the requests
that both answered. With one request at a time it is the speedup of the whole workload; with more, what each user sees. Its
interval is a percentile bootstrap over pairs, so prompts are the sample and the servers are fixed.

Where a server counts no tokens, pairs with the same text stand for themselves: as many tokens on either side, so the ratio
is one of times.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.lab.intervals import ratio_of_rates
from outrider.lab.result import Interval
from outrider.lab.server.types import AnswerDifference, LevelComparison, LevelMeasurement, MeasuredAnswer

MIN_PAIRS = 8  # for an interval
MAX_DIFFERENCES = 20  # kept; all are counted
AROUND = 60  # characters shown of each text

Pair = tuple[MeasuredAnswer, MeasuredAnswer]  # baseline, other


def compare(baseline: LevelMeasurement, other: LevelMeasurement, *, greedy: bool) -> LevelComparison:
    """Both at one level."""
    theirs = {answer.id: answer for answer in other.answers}
    pairs = [(answer, theirs[answer.id]) for answer in baseline.answers if answer.id in theirs]
    differing = [pair for pair in pairs if pair[0].text != pair[1].text]
    ratio = None
    if baseline.tokens_per_s and other.tokens_per_s:
        ratio = other.tokens_per_s / baseline.tokens_per_s
    return LevelComparison(
        level=other.level,
        num_pairs=len(pairs),
        speedup=_speedup(pairs),
        throughput_ratio=ratio,
        num_identical=len(pairs) - len(differing) if greedy else None,
        differences=[_difference(pair) for pair in differing[:MAX_DIFFERENCES]] if greedy else [],
    )


def _speedup(pairs: Sequence[Pair]) -> Interval | None:
    rows = [(a.num_tokens, a.seconds, b.num_tokens, b.seconds) for a, b in pairs if a.num_tokens and b.num_tokens]
    rows = rows or [(1, a.seconds, 1, b.seconds) for a, b in pairs if a.text and a.text == b.text]
    if not rows or not all(row[1] and row[3] for row in rows):
        return None
    tokens, seconds, tokens_here, seconds_here = map(list, zip(*rows, strict=True))
    found = ratio_of_rates(tokens_here, seconds_here, tokens, seconds)
    return found if len(rows) >= MIN_PAIRS and found.is_known else Interval.unknown(found.value)


def _difference(pair: Pair) -> AnswerDifference:
    texts = [answer.text for answer in pair]
    position = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    return AnswerDifference(
        id=pair[0].id,
        position=position,
        baseline=texts[0][position : position + AROUND],
        other=texts[1][position : position + AROUND],
    )
