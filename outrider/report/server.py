"""Servers that were measured, as blocks for a bench report: one against the other, speed, and what
their counters say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider.lab.bench.bench_result import (
    MeasuredAnswer,
    Percentiles,
    ServerMeasurement,
    SpeculationCounts,
)
from outrider.report.document import (
    NOTHING,
    Block,
    Bullets,
    Cells,
    Chart,
    Heading,
    Paragraph,
    Tone,
    table,
    word,
)
from outrider.report.render import SPEEDUP, plain_bar, speedup_bar
from outrider.report.text import interval, number

SHOWN = 5  # failures of each server, and requests whose texts differ


def blocks(servers: Sequence[ServerMeasurement]) -> Iterator[Block]:
    """All there is to say of servers; the caller's document has the title."""
    yield from _comparisons(servers)
    yield table(servers, SPEED, f"Speed, {servers[0].concurrency} requests at once")
    turns = [turn for server in servers for turn in _turns_of(server)]
    if turns:
        yield table(turns, TURNS, "By turn of a conversation")
    yield from _speculation(servers)
    yield from _troubles(servers)


def _three(values: Percentiles | None, scale: float = 1000, digits: int = 1) -> str:
    if values is None:
        return NOTHING
    three = (values.p50, values.p90, values.p99)
    return " / ".join(number(scale * value, digits) for value in three)


SPEED: Cells[ServerMeasurement] = {
    "server": lambda server: server.label,
    "server tokens/s": lambda server: number(server.tokens_per_s, 1),
    "TTFT (ms)": lambda server: _three(server.ttft_s),
    "TPOT (ms)": lambda server: _three(server.tpot_s),
    "request (s)": lambda server: _three(server.request_s, 1, 2),
    "answered": lambda server: f"{len(server.answers)} of {server.num_requests}",
    "model": lambda server: " on ".join(filter(None, [server.model, server.engine])),
    "URL": lambda server: server.url,
}


@dataclass(frozen=True)
class TurnOfServer:
    """One turn of all conversations at one server."""

    label: str
    turn: int
    answers: Sequence[MeasuredAnswer]


TURNS: Cells[TurnOfServer] = {
    "server": lambda row: row.label,
    "turn": lambda row: str(row.turn),
    "answered": lambda row: str(len(row.answers)),
    "TTFT (ms)": lambda row: _three(Percentiles.of(one.ttft_s for one in row.answers)),
    "TPOT (ms)": lambda row: _three(Percentiles.of(one.tpot_s for one in row.answers)),
    "prompt tokens cached": lambda row: _mean(one.num_cached for one in row.answers),
}


def _mean(counts: Iterable[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return number(fmean(known), 0) if known else NOTHING


def _turns_of(server: ServerMeasurement) -> Iterator[TurnOfServer]:
    """Nothing where there are first turns only."""
    turns = sorted({answer.turn for answer in server.answers})
    for turn in turns if len(turns) > 1 else ():
        answers = [answer for answer in server.answers if answer.turn == turn]
        yield TurnOfServer(server.label, turn, answers)


def _comparisons(servers: Sequence[ServerMeasurement]) -> Iterator[Block]:
    for server in servers:
        comparison = server.comparison
        if comparison is None or comparison.speedup is None:
            continue
        speedup = comparison.speedup
        tone: Tone = "good" if speedup.low > 1 else "bad" if speedup.high < 1 else "caution"
        yield Paragraph(
            f"{server.label} brings {interval(speedup, 'x')} the tokens/s of {comparison.baseline} "
            f"(95 % interval, {comparison.num_pairs} prompts).",
            tone,
        )
        bars = [speedup_bar(server.label, speedup), plain_bar(comparison.baseline)]
        yield Chart(SPEEDUP, "server", "speedup", {"": bars}, baseline=1.0)
        if comparison.differing:
            yield Paragraph(
                f"{len(comparison.differing)} of {comparison.num_pairs} greedy texts differ "
                f"(requests {', '.join(comparison.differing[:SHOWN])}). That need not be "
                "speculation: batches, kernels and rounding decide near ties too. To know, compare "
                "a server with itself.",
                "caution",
            )
        elif comparison.differing is not None:
            yield Paragraph(
                f"All {comparison.num_pairs} greedy texts are the same on both servers."
            )


def _speculation(servers: Sequence[ServerMeasurement]) -> Iterator[Block]:
    counted = [(server.label, server.speculation) for server in servers if server.speculation]
    if counted:
        yield table(counted, SPECULATION, "Speculation, as the servers count it")
    else:
        yield Paragraph("No server shows speculation counters, so its acceptance is unknown.")


def _positions(counts: SpeculationCounts) -> str:
    shares = [count / counts.num_steps for count in counts.accepted_per_position]
    return " ".join(map(number, shares)) or NOTHING


SPECULATION: Cells[tuple[str, SpeculationCounts]] = {
    "server": lambda row: row[0],
    "tokens per pass": lambda row: number(row[1].tau),
    "accepted of drafted": lambda row: number(row[1].draft_utilisation),
    "kept by position": lambda row: _positions(row[1]),
    "passes with a draft": lambda row: str(row[1].num_steps),
    "drafted": lambda row: word(row[1].num_draft_tokens),
    "accepted tokens": lambda row: word(row[1].num_accepted_tokens),
}


def _troubles(servers: Sequence[ServerMeasurement]) -> Iterator[Block]:
    for server in servers:
        missing = server.num_requests - len(server.answers)
        if missing:
            yield Paragraph(
                f"{server.label}: {missing} requests without an answer, {len(server.failures)} of "
                "them failed. All numbers are of the answers that came to their end.",
                "caution",
            )
            yield Bullets(server.failures[:SHOWN])
    notes = [f"{server.label}: {note}" for server in servers for note in server.notes]
    if notes:
        yield Heading("To keep in mind")
        yield Bullets(notes)
