"""Servers that were measured, as blocks for a bench report: speed, what their counters say, and one
against the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.lab.bench.bench_result import Percentiles, ServerMeasurement
from outrider.report.document import Block, Bullets, Fact, Heading, Paragraph, Tone, table, word
from outrider.report.text import interval, number

SHOWN = 5  # failures of each server, and requests whose texts differ


def _three(values: Percentiles | None, scale: float = 1000, digits: int = 1) -> str:
    if values is None:
        return "-"
    return " / ".join(
        f"{scale * value:.{digits}f}" for value in (values.p50, values.p90, values.p99)
    )


SPEED: tuple[Fact[ServerMeasurement], ...] = (
    Fact("server", lambda one: one.label, align="left"),
    Fact("URL", lambda one: one.url, align="left"),
    Fact(
        "model",
        lambda one: f"{one.model} on {one.engine}" if one.engine else one.model,
        align="left",
    ),
    Fact(
        "answered",
        lambda one: f"{len(one.answers)} of {one.num_requests}",
        "requests that were answered to their end",
    ),
    Fact(
        "tokens/s",
        lambda one: number(one.tokens_per_s, 1),
        "completion tokens of all answers, as the server counts them / seconds in which requests "
        "ran",
    ),
    Fact(
        "TTFT (ms)",
        lambda one: _three(one.ttft_s),
        "from sending to the first chunk with text; p50 / p90 / p99",
    ),
    Fact(
        "TPOT (ms)", lambda one: _three(one.tpot_s), "(request − TTFT) / (tokens − 1), per request"
    ),
    Fact(
        "request (s)",
        lambda one: _three(one.request_s, 1, 2),
        "from sending to the end of the text",
    ),
)


def blocks(servers: Sequence[ServerMeasurement]) -> Iterator[Block]:
    """All there is to say of servers; the caller's document has the title."""
    yield from _comparisons(servers)
    yield table(servers, SPEED, f"Speed, {servers[0].concurrency} at once")
    yield from _speculation(servers)
    yield from _troubles(servers)


def _comparisons(servers: Sequence[ServerMeasurement]) -> Iterator[Block]:
    for server in servers:
        comparison = server.comparison
        if comparison is None or comparison.speedup is None:
            continue
        tone: Tone = (
            "good"
            if comparison.speedup.low > 1
            else "bad"
            if comparison.speedup.high < 1
            else "caution"
        )
        speedup = interval(comparison.speedup, "x")
        yield Paragraph(
            f"{server.label}: {speedup} tokens/s of {comparison.baseline}, over {comparison.num_pairs} prompts",
            tone,
        )
        if comparison.differing:
            yield Paragraph(
                f"{len(comparison.differing)} of {comparison.num_pairs} greedy texts differ (requests "
                f"{', '.join(comparison.differing[:SHOWN])}). Between two servers that need not be "
                "speculation: another batch, "
                "kernel or rounding decides near ties too. To know, compare a server with itself.",
                "caution",
            )
        elif comparison.differing is not None:
            yield Paragraph(
                f"All {comparison.num_pairs} greedy texts are the same on both servers.", "good"
            )


def _speculation(servers: Sequence[ServerMeasurement]) -> Iterator[Block]:
    counted = [
        (server.label, server.speculation) for server in servers if server.speculation is not None
    ]
    if not counted:
        yield Paragraph("No server shows speculation counters, so τ and acceptance are unknown.")
        return
    yield table(
        counted,
        [
            Fact("server", lambda one: one[0], align="left"),
            Fact(
                "τ",
                lambda one: number(one[1].tau),
                "tokens per target pass that had a draft, its own token included",
            ),
            Fact("utilisation", lambda one: number(one[1].draft_utilisation), "accepted / drafted"),
            Fact(
                "steps",
                lambda one: word(one[1].num_steps),
                "passes that had a draft; from /metrics, after minus before",
            ),
            Fact("drafted", lambda one: word(one[1].num_draft_tokens)),
            Fact("accepted", lambda one: word(one[1].num_accepted_tokens)),
            Fact(
                "by position",
                lambda one: (
                    " ".join(
                        f"{count / one[1].num_steps:.2f}" for count in one[1].accepted_per_position
                    )
                    or "-"
                ),
                "passes that kept the token at this position / passes with a draft",
                "left",
            ),
        ],
        "Speculation, as the servers count it",
    )


def _troubles(servers: Sequence[ServerMeasurement]) -> Iterator[Block]:
    for server in servers:
        missing = server.num_requests - len(server.answers)
        if missing:
            yield Paragraph(
                f"{server.label}: {missing} requests without an answer, {len(server.failures)} of them "
                "failed. All numbers are of the answers that came to their end.",
                "caution",
            )
            yield Bullets(server.failures[:SHOWN])
    notes = [f"{server.label}: {note}" for server in servers for note in server.notes]
    if notes:
        yield Heading("To keep in mind")
        yield Bullets(notes)
