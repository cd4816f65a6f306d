"""Servers that were measured, as blocks for a bench report: load, latency, what their counters say, and one against the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from outrider.lab.server.server_result import PositionRow, positions
from outrider.lab.server.types import (
    LevelComparison,
    LevelMeasurement,
    Percentiles,
    ServerMeasurement,
    SpeculationCounts,
)
from outrider.report.document import Block, Bullets, Column, Fact, Heading, Paragraph, Table, curves, table, word
from outrider.report.text import interval, number

T = TypeVar("T")
MILLISECONDS = 1000
MAX_FAILURES = 5  # shown of each server
PERCENTILES_HELP = "percentiles over the answers, linear between neighbours; of fewer than 100 p99 is close to the largest"
THROUGHPUT: tuple[Fact[LevelMeasurement], ...] = (
    Fact(
        "answered", lambda level: f"{len(level.answers)} of {level.num_requests}",
        "requests that were answered to their end, of those asked for",
    ),
    Fact(
        "tokens/s", lambda level: number(level.tokens_per_s, 1),
        "completion tokens of all answers, as the server counts them / seconds in which requests ran",
    ),
    Fact("requests/s", lambda level: number(level.requests_per_s), "answers / the same seconds"),
    Fact(
        "tokens/chunk", lambda level: number(level.tokens_per_chunk),
        "tokens / chunks of the stream; not τ: a server may send steps together, or apart",
    ),
)  # fmt: skip
LATENCY: tuple[Fact[LevelMeasurement], ...] = (
    Fact(
        "TTFT (ms)", lambda level: _three(level.ttft_s),
        f"time to first token: from sending to the first chunk with text; {PERCENTILES_HELP}",
    ),
    Fact(
        "TPOT (ms)", lambda level: _three(level.tpot_s),
        "time per output token: (request − TTFT) / (tokens − 1), per request",
    ),
    Fact(
        "chunk gap (ms)", lambda level: _three(level.gap_s),
        "from one chunk to the next, over all gaps of all answers: inter-token latency as seen",
    ),
    Fact("request (s)", lambda level: _three(level.request_s, scale=1, digits=2), "from sending to the last chunk"),
)  # fmt: skip
POSITIONS: tuple[Fact[PositionRow], ...] = (
    Fact("position", lambda row: str(row.position)),
    Fact("accepted", lambda row: str(row.accepted), "passes that kept the token at this position"),
    Fact("of all", lambda row: number(row.share), "accepted / passes with a draft"),
    Fact(
        "given the one before", lambda row: interval(row.given),
        "accepted / passes that kept the position before, with Wilson's 95 % interval",
    ),
)  # fmt: skip


def blocks(measurements: Sequence[ServerMeasurement]) -> Iterator[Block]:
    """All there is to say of servers; the caller's document has the title."""
    yield Heading("Servers")
    yield _servers(measurements)
    title = "Throughput by load: requests in flight, a new one as soon as one ends"
    yield _by_level(measurements, lambda level: [level], THROUGHPUT, title)
    yield _by_level(measurements, lambda level: [level], LATENCY, "Latency: p50 / p90 / p99")
    yield from _speculation(measurements)
    for measurement in measurements:
        yield from _comparison(measurement)
    yield from _plots(measurements)
    yield from _troubles(measurements)


def _servers(measurements: Sequence[ServerMeasurement]) -> Table:
    return table(
        measurements,
        [
            Fact("server", lambda one: one.label, align="left"),
            Fact("URL", lambda one: one.url, align="left"),
            Fact("engine", lambda one: " ".join(filter(None, (one.server.engine, one.server.version))), align="left"),
            Fact("model", lambda one: one.server.model, align="left"),
            Fact("counters", lambda one: "/metrics" if one.server.metrics else "none", align="left"),
        ],
    )


def _by_level(
    measurements: Sequence[ServerMeasurement], read: Callable[[LevelMeasurement], Iterable[T]], facts: Sequence[Fact[T]],
    title: str,
) -> Table:  # fmt: skip
    """Rows for what `read` finds in a level."""
    rows = [
        [one.label, level.level.label, *(fact.cell(subject) for fact in facts)]
        for one, level in _levels(measurements)
        for subject in read(level)
    ]
    return Table([Column("server", "left"), Column("load", "left"), *(fact.column for fact in facts)], rows, title)


def _speculation(measurements: Sequence[ServerMeasurement]) -> Iterator[Block]:
    if not any(level.speculation for _, level in _levels(measurements)):
        yield Paragraph("No server shows speculation counters, so τ and acceptance are unknown.")
        return
    facts: list[Fact[SpeculationCounts]] = [
        Fact(
            "τ", lambda counts: number(counts.tau),
            f"tokens per target pass that had a draft, its correction or bonus token included: {_formulas(measurements)}",
        ),
        Fact(
            "α", lambda counts: number(counts.alpha),
            "accepted / tested; known where every draft is a chain of one length or the server counts lengths",
        ),
        Fact(
            "utilisation", lambda counts: number(counts.draft_utilisation),
            "accepted / drafted (vLLM calls this the acceptance rate)",
        ),
        Fact("steps", lambda counts: word(counts.num_steps), "target passes that had a draft; from /metrics, after minus before"),
        Fact("drafted", lambda counts: word(counts.num_draft_tokens)),
        Fact("accepted", lambda counts: word(counts.num_accepted_tokens)),
    ]  # fmt: skip
    yield _by_level(measurements, _counted, facts, "Speculation, as the servers count it")
    by_position = _by_level(
        measurements, lambda level: [row for counts in _counted(level) for row in positions(counts)], POSITIONS,
        "Acceptance by position",
    )  # fmt: skip
    if by_position.rows:
        yield by_position


def _counted(level: LevelMeasurement) -> list[SpeculationCounts]:
    return [] if level.speculation is None else [level.speculation]


def _comparison(measurement: ServerMeasurement) -> Iterator[Block]:
    if not any(one.num_pairs for one in measurement.comparisons):
        return
    facts: list[Fact[LevelComparison]] = [
        Fact("load", lambda one: one.level.label, align="left"),
        Fact("pairs", lambda one: str(one.num_pairs), "requests that both servers answered"),
        Fact(
            "speedup", lambda one: interval(one.speedup),
            "tokens/s of a request here / there, sums over the pairs (where tokens are not counted: seconds there / here of "
            "pairs with the same text); 95 % bootstrap interval over pairs",
        ),
        Fact("throughput", lambda one: number(one.throughput_ratio), "tokens/s of the whole load here / there"),
        Fact(
            "same text", lambda one: "-" if one.num_identical is None else f"{one.num_identical} of {one.num_pairs}",
            "pairs with the same greedy text, character by character; - when texts were sampled",
        ),
    ]  # fmt: skip
    yield table(measurement.comparisons, facts, f"{measurement.label} against {measurement.baseline}, request by request")
    yield from _differences(measurement)


def _differences(measurement: ServerMeasurement) -> Iterator[Block]:
    differing = [(one.level.label, difference) for one in measurement.comparisons for difference in one.differences]
    if not differing:
        return
    yield Paragraph(
        "Some greedy texts differ. Between two servers that need not be speculation: another batch, kernel or rounding decides "
        "near ties too. To know, compare a server with itself.",
        tone="caution",
    )
    yield Bullets(
        [
            f"{level}, request {one.id}, from character {one.position}: {one.baseline!r} there, {one.other!r} here"
            for level, one in differing[:MAX_FAILURES]
        ]
    )


def _plots(measurements: Sequence[ServerMeasurement]) -> Iterator[Block]:
    """Over the number of requests in flight, where there is more than one number."""
    if len({level.level.concurrency for _, level in _levels(measurements)}) < 2:
        return
    wanted: list[tuple[str, str, Callable[[LevelMeasurement], float | None]]] = [
        ("Throughput by load", "tokens/s", lambda level: level.tokens_per_s),
        ("Time per output token by load", "TPOT, median (ms)", lambda level: _median(level.tpot_s)),
        ("Time to first token by load", "TTFT, median (ms)", lambda level: _median(level.ttft_s)),
    ]
    for title, y_label, read in wanted:
        lines = {one.label: {level.level.concurrency: read(level) for level in one.levels} for one in measurements}
        if any(value is not None for line in lines.values() for value in line.values()):
            yield curves(title, "requests in flight", y_label, lines, log_x=True)


def _troubles(measurements: Sequence[ServerMeasurement]) -> Iterator[Block]:
    """Failures, then all notes, each under the server's name."""
    for one in measurements:
        failures = [failure for level in one.levels for failure in level.failures]
        if failures or not one.complete:
            missing = sum(level.num_requests - len(level.answers) for level in one.levels)
            yield Paragraph(
                f"{one.label}: requests without an answer: {missing} ({len(failures)} failed, {missing - len(failures)} not "
                "sent). All numbers are of the answers that came to their end.",
                tone="caution",
            )
            yield Bullets([f"request {failure.id}: {failure.message}" for failure in failures[:MAX_FAILURES]])
    if notes := [f"{one.label}: {note}" for one in measurements for note in (*one.notes, *_level_notes(one))]:
        yield Bullets(notes)


def _level_notes(measurement: ServerMeasurement) -> list[str]:
    """Each once, with the levels it is about unless it is about all."""
    by_note: dict[str, list[str]] = {}
    for level in measurement.levels:
        gauges = [f"{name} stood at {value:.2f}" for name, value in level.gauges.items()]
        for note in (*level.notes, *gauges):
            by_note.setdefault(note, []).append(level.level.label)
    return [
        note if len(labels) == len(measurement.levels) else f"{', '.join(labels)}: {note}" for note, labels in by_note.items()
    ]


def _levels(measurements: Sequence[ServerMeasurement]) -> Iterator[tuple[ServerMeasurement, LevelMeasurement]]:
    """Level by level, the servers of each beside one another."""
    num_levels = max((len(one.levels) for one in measurements), default=0)
    for index in range(num_levels):
        yield from ((one, one.levels[index]) for one in measurements if index < len(one.levels))


def _formulas(measurements: Sequence[ServerMeasurement]) -> str:
    counted = [(counts, one) for one, level in _levels(measurements) for counts in _counted(level) if counts.tau is not None]
    formulas = dict.fromkeys(f"{counts.tau_formula} ({one.server.engine})" for counts, one in counted)
    return "; ".join(formulas) or "no server reports how many steps there were"


def _three(values: Percentiles | None, scale: float = MILLISECONDS, digits: int = 1) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{scale * value:.{digits}f}" for value in (values.p50, values.p90, values.p99))


def _median(values: Percentiles | None) -> float | None:
    return None if values is None else MILLISECONDS * values.p50
