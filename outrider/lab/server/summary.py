"""From the answers of one server at one level to its numbers, and against a baseline request by request.

The speedup is that of a request: tokens per second here over tokens per second there, each a ratio of sums over the requests
that both answered. With one request at a time it is the speedup of the whole workload; with more, what each user sees. Its
interval is a percentile bootstrap over pairs, so prompts are the sample and the servers are fixed. Where a server counts no
tokens, pairs with the same text stand for themselves: as many tokens on either side, so the ratio is one of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from outrider.lab.intervals import ratio_of_rates
from outrider.lab.result import Interval
from outrider.lab.server.counters import CounterWindow
from outrider.lab.server.types import (
    AnswerDifference,
    Failure,
    Level,
    LevelComparison,
    LevelMeasurement,
    MeasuredAnswer,
    Percentiles,
)

SHARES = (50, 90, 99)
BURST_TOKENS, BURST_TPOT_S = 16, 0.0002  # no model streams 16 tokens faster than that, one after the other
OTHERS = 1.02  # times the tokens received: a server that generated more served somebody else too
MIN_PAIRS = 8  # for an interval
MAX_DIFFERENCES = 20  # kept; all are counted
AROUND = 60  # characters shown of each text
Pair = tuple[MeasuredAnswer, MeasuredAnswer]  # baseline, other


def summarise(
    level: Level,
    num_requests: int,
    answers: Sequence[MeasuredAnswer],
    failures: Sequence[Failure],
    window: CounterWindow | None,
) -> LevelMeasurement:
    """`window`: what the counters say; None for a server without counters, or a run that was cut short."""
    busy_s = busy_seconds(answers)
    tokens = num_tokens(answers)
    num_chunks = sum(len(answer.chunks_s) for answer in answers)
    return LevelMeasurement(
        level=level,
        num_requests=num_requests,
        answers=list(answers),
        failures=list(failures),
        busy_s=busy_s,
        tokens_per_s=tokens / busy_s if tokens is not None and busy_s else None,
        requests_per_s=len(answers) / busy_s if busy_s else None,
        tokens_per_chunk=tokens / num_chunks if tokens is not None and num_chunks else None,
        request_s=percentiles(answer.seconds for answer in answers),
        ttft_s=percentiles(answer.ttft_s for answer in answers),
        tpot_s=percentiles(answer.tpot_s for answer in answers),
        gap_s=percentiles(gap for answer in answers for gap in answer.gaps_s),
        speculation=None if window is None else window.speculation,
        gauges={} if window is None else window.gauges,
        notes=list(_notes(level, answers, window)),
    )


def busy_seconds(answers: Iterable[MeasuredAnswer]) -> float:
    """Sum over windows of the time from a window's first request to its last answer."""
    spans: dict[int, tuple[float, float]] = {}
    for answer in answers:
        first, last = spans.get(answer.window, (answer.start_s, 0.0))
        spans[answer.window] = (min(first, answer.start_s), max(last, answer.start_s + answer.seconds))
    return sum(last - first for first, last in spans.values())


def num_tokens(answers: Sequence[MeasuredAnswer]) -> int | None:
    """Tokens of all answers; None where one of them was not counted."""
    numbers = [answer.num_tokens for answer in answers]
    return None if None in numbers or not numbers else sum(number for number in numbers if number is not None)


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """None of no values; those that are None do not count."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = np.percentile(known, SHARES).tolist()
    return Percentiles(n=len(known), mean=float(np.mean(known)), p50=p50, p90=p90, p99=p99)


def _notes(level: Level, answers: Sequence[MeasuredAnswer], window: CounterWindow | None) -> Iterator[str]:
    yield from [] if window is None else [*window.notes, *_doubts(answers, window)]
    uncounted = sum(answer.num_tokens is None for answer in answers)
    if uncounted:
        yield f"{uncounted} of {len(answers)} answers came without token counts (usage): rates per token are left out"
    if share := _cached_share(answers, window):
        yield f"{share:.0%} of the prompt tokens came from the server's prefix cache: first tokens come early"
    if bursts := sum(map(_came_at_once, answers)):
        yield (
            f"{bursts} of {len(answers)} answers came nearly at once: the server, or something before it, held the stream back, "
            "and their time to first token is that of the whole answer"
        )
    if 0 < len(answers) < level.concurrency:
        yield f"{len(answers)} requests cannot keep {level.concurrency} in flight: at most {len(answers)} were"


def _cached_share(answers: Sequence[MeasuredAnswer], window: CounterWindow | None) -> float:
    """The cached share of the prompt tokens, as the answers say; else as the server's counters do. 0 where neither does."""
    cached = sum(answer.num_cached_tokens or 0 for answer in answers)
    prompts = sum(answer.num_prompt_tokens or 0 for answer in answers)
    if not cached and window is not None:
        cached, prompts = window.num_cached_tokens or 0, window.num_prompt_tokens or 0
    return cached / prompts if prompts else 0.0


def _came_at_once(answer: MeasuredAnswer) -> bool:
    """Many tokens in no time, or in a chunk or two."""
    tokens = answer.num_tokens or 0
    if tokens < BURST_TOKENS or answer.tpot_s is None:
        return False
    return answer.tpot_s < BURST_TPOT_S or tokens >= BURST_TOKENS * len(answer.chunks_s)


def _doubts(answers: Sequence[MeasuredAnswer], window: CounterWindow) -> list[str]:
    """Why the counters may say something else than the answers."""
    generated, received = window.num_generated or 0, num_tokens(answers)
    if not received or generated <= OTHERS * received:
        return []
    return [
        f"the server generated {generated} tokens meanwhile, of which this run received {received}: its counters also hold "
        "other traffic, or requests that failed"
    ]


def compare(baseline: LevelMeasurement, other: LevelMeasurement, *, greedy: bool) -> LevelComparison:
    """A server against the baseline at one level, request by request."""
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
