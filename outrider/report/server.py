"""Servers that were measured, as blocks for a bench report: load, latency, what their counters say, and one against the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from outrider.lab.server.positions import positions
from outrider.lab.server.types import LevelMeasurement, Percentiles, ServerMeasurement, SpeculationCounts
from outrider.report.document import Block, Bullets, Column, Heading, Paragraph, Table, curves
from outrider.report.text import interval, number

MILLISECONDS = 1000
MAX_FAILURES = 5  # shown of each server
PERCENTILES_HELP = "percentiles over the answers, linear between neighbours; of fewer than 100 p99 is close to the largest"
SPEEDUP_HELP = (
    "tokens/s of a request here / there, sums over the pairs (where tokens are not counted: seconds there / here of pairs with "
    "the same text); 95 % bootstrap interval over pairs"
)
LABEL = Column("server", "left")
LOAD = Column("load", "left")
LOAD_EXPLAINED = Column("load", "left", "requests in flight (a new one as soon as one ends)")


def blocks(measurements: Sequence[ServerMeasurement]) -> list[Block]:
    """All there is to say of them; the caller's document has the title."""
    found: list[Block] = [Heading("Servers"), _servers(measurements)]
    found += [_throughput(measurements), _latency(measurements)]
    found += _speculation(measurements)
    for measurement in measurements:
        found += _comparison(measurement)
    found += _plots(measurements)
    found += _troubles(measurements)
    return found


def _servers(measurements: Sequence[ServerMeasurement]) -> Table:
    columns = [LABEL, Column("URL", "left"), Column("engine", "left"), Column("model", "left"), Column("counters", "left")]
    rows = []
    for one in measurements:
        engine = " ".join(filter(None, (one.server.engine, one.server.version)))
        rows.append([one.label, one.url, engine, one.server.model, "/metrics" if one.server.metrics else "none"])
    return Table(columns, rows)


def _throughput(measurements: Sequence[ServerMeasurement]) -> Table:
    columns = [
        LABEL,
        LOAD_EXPLAINED,
        Column("answered", help="requests that were answered to their end, of those asked for"),
        Column("tokens/s", help="completion tokens of all answers, as the server counts them / seconds in which requests ran"),
        Column("requests/s", help="answers / the same seconds"),
        Column("tokens/chunk", help="tokens / chunks of the stream; not τ: a server may send steps together, or apart"),
    ]
    rows = [
        [
            one.label,
            level.level.label,
            f"{len(level.answers)} of {level.num_requests}",
            number(level.tokens_per_s, 1),
            number(level.requests_per_s),
            number(level.tokens_per_chunk),
        ]
        for one, level in _levels(measurements)
    ]
    return Table(columns, rows, title="Throughput")


def _latency(measurements: Sequence[ServerMeasurement]) -> Table:
    columns = [
        LABEL,
        LOAD,
        Column("TTFT (ms)", help=f"time to first token: from sending to the first chunk with text; {PERCENTILES_HELP}"),
        Column("TPOT (ms)", help="time per output token: (request − TTFT) / (tokens − 1), per request"),
        Column("chunk gap (ms)", help="from one chunk to the next, over all gaps of all answers: inter-token latency as seen"),
        Column("request (s)", help="from sending to the last chunk"),
    ]
    rows = [
        [
            one.label,
            level.level.label,
            _three(level.ttft_s),
            _three(level.tpot_s),
            _three(level.gap_s),
            _three(level.request_s, scale=1, digits=2),
        ]
        for one, level in _levels(measurements)
    ]
    return Table(columns, rows, title="Latency: p50 / p90 / p99")


def _speculation(measurements: Sequence[ServerMeasurement]) -> Iterator[Block]:
    known = [(one, level, level.speculation) for one, level in _levels(measurements) if level.speculation is not None]
    if not known:
        yield Paragraph(
            "No server shows speculation counters, so τ and acceptance are unknown."
        )
        return
    columns = [
        LABEL,
        LOAD,
        Column("τ", help=f"tokens per target pass that had a draft, its correction or bonus token included: {_formulas(known)}"),
        Column("α", help="accepted / tested; known where every draft is a chain of one length or the server counts lengths"),
        Column("utilisation", help="accepted / drafted (vLLM calls this the acceptance rate)"),
        Column("steps", help="target passes that had a draft; from /metrics, after minus before"),
        Column("drafted"),
        Column("accepted"),
    ]
    rows = [[one.label, level.level.label, *_counts(counts)] for one, level, counts in known]
    yield Table(columns, rows, title="Speculation, as the servers count it")
    by_position = [
        [one.label, level.level.label, str(row.position), str(row.accepted), number(row.share), interval(row.given)]
        for one, level, counts in known
        for row in positions(counts)
    ]
    if by_position:
        columns = [
            LABEL,
            LOAD,
            Column("position"),
            Column("accepted", help="passes that kept the token at this position"),
            Column("of all", help="accepted / passes with a draft"),
            Column("given the one before", help="accepted / passes that kept the position before, with Wilson's 95 % interval"),
        ]
        yield Table(columns, by_position, title="Acceptance by position")


def _comparison(measurement: ServerMeasurement) -> Iterator[Block]:
    if not any(one.num_pairs for one in measurement.comparisons):
        return
    columns = [
        LOAD,
        Column("pairs", help="requests that both servers answered"),
        Column("speedup", help=SPEEDUP_HELP),
        Column("throughput", help="tokens/s of the whole load here / there"),
        Column("same text", help="pairs with the same greedy text, character by character; - when texts were sampled"),
    ]
    rows = []
    for one in measurement.comparisons:
        speedup = interval(one.speedup_interval) if one.speedup_interval else number(one.speedup)
        same = "-" if one.num_identical is None else f"{one.num_identical} of {one.num_pairs}"
        rows.append([one.level.label, str(one.num_pairs), speedup, number(one.throughput_ratio), same])
    yield Table(columns, rows, title=f"{measurement.label} against {measurement.baseline}, request by request")
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


def _formulas(known: Sequence[tuple[ServerMeasurement, LevelMeasurement, SpeculationCounts]]) -> str:
    formulas = dict.fromkeys((counts.tau_formula, one.server.engine) for one, _, counts in known if counts.tau is not None)
    return "; ".join(f"{formula} ({engine})" for formula, engine in formulas) or "no server reports how many steps there were"


def _counts(counts: SpeculationCounts) -> list[str]:
    whole = (counts.num_steps, counts.num_draft_tokens, counts.num_accepted_tokens)
    rates = (counts.tau, counts.alpha, counts.draft_utilisation)
    return [*map(number, rates), *("-" if value is None else str(value) for value in whole)]


def _three(values: Percentiles | None, scale: float = MILLISECONDS, digits: int = 1) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{scale * value:.{digits}f}" for value in (values.p50, values.p90, values.p99))


def _median(values: Percentiles | None) -> float | None:
    return None if values is None else MILLISECONDS * values.p50
