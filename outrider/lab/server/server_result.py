"""What `outrider explain URL` and `outrider tune URL` found: acceptance from counters, costs from two servers' clocks.

A token of the plain server takes as long as a plain pass; a token of the speculating one, times the tokens that its passes emit,
as long as a pass with its drafts. Between the two a pass is taken to cost so much more for each draft token, in equal steps. So
for k tokens, S(i) being the share of passes that keep token i,

    speedup(k) = (1 + S(1) + ... + S(k)) / (1 + (cost - 1) k / K),   cost = pass with K draft tokens / plain pass

Longer drafts than the server makes are not spoken about: nothing was counted there. How far drafts survive is the same in every
engine that counts accepted tokens by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.lab.intervals import WORTH, proportion
from outrider.lab.result import Comparable, Interval, Record, Result
from outrider.lab.server.types import Level, LevelMeasurement, ServerMeasurement, SpeculationCounts

RARELY, OFTEN = 0.1, 0.5  # of the steps
MIN_STEPS = 100
SILENT = "how many drafts there were and what was accepted, which the server does not say"
PLAIN_NEEDED = "what a pass costs without drafts: measure the plain server, too (--baseline-url)"


class PositionRow(Record):
    """One draft position, from 1."""

    position: int
    accepted: int  # steps in which it was
    share: float  # of all steps with a draft
    given: Interval | None  # of the steps that kept the position before; Wilson's interval, as if steps were independent


def positions(counts: SpeculationCounts) -> list[PositionRow]:
    """A row for every position that was counted; none where the server does not count them."""
    if not counts.num_steps:
        return []
    rows, before = [], counts.num_steps
    for index, accepted in enumerate(counts.accepted_per_position):
        given = proportion(accepted, before) if 0 <= accepted <= before and before else None
        rows.append(PositionRow(position=index + 1, accepted=accepted, share=accepted / counts.num_steps, given=given))
        before = accepted
    return rows


def findings(counts: SpeculationCounts) -> Iterator[str]:
    """What the counts say about the drafts, a sentence each."""
    if counts.num_steps is None:
        yield "The server counts no passes with a draft, so its drafts cannot be judged."
        return
    if not counts.num_steps:
        yield "No pass had a draft: the server does not speculate, or drafted nothing for these prompts."
        return
    if counts.tau is not None:
        yield f"A pass with a draft emits {counts.tau:.2f} tokens ({counts.tau_formula})."
    if counts.draft_utilisation is not None and counts.num_draft_tokens:
        length = counts.num_draft_tokens / counts.num_steps
        yield f"{counts.draft_utilisation:.0%} of the draft tokens are accepted, of {length:.1f} a pass."
    yield from _by_position(counts)
    if counts.num_steps < MIN_STEPS:
        yield f"That rests on {counts.num_steps} passes; more prompts, or longer answers, tell more."


def _by_position(counts: SpeculationCounts) -> Iterator[str]:
    rows = positions(counts)
    if not rows:
        yield "The server does not count accepted tokens by position, so where drafts break off is unknown."
        return
    last = rows[-1]
    rare = [row for row in rows if row.share < RARELY]
    if rows[0].share < OFTEN:
        yield (
            f"The first draft token is rejected in {1 - rows[0].share:.0%} of the passes: the drafter does not suit these "
            "prompts; another length cannot change that."
        )
    if rare and rare[0].position > 1 and (total := sum(row.accepted for row in rows)):
        kept = sum(row.accepted for row in rows[: rare[0].position - 1]) / total
        yield (
            f"From position {rare[0].position} on, fewer than one pass in ten keeps the token: drafts of {rare[0].position - 1} "
            f"would keep {kept:.0%} of what is kept now."
        )
    if last.share > OFTEN:
        yield f"{last.share:.0%} of the passes keep the last token, at position {last.position}: longer drafts may pay."


class LevelAdvice(Record):
    """One load."""

    level: Level
    num_draft_tokens: float | None = None  # a pass, on average (K)
    tokens_per_pass: float | None = None  # passes without a draft included
    pass_ms: float | None = None
    plain_pass_ms: float | None = None
    measured: float | None = None  # speedup of these drafts: plain ms a token / its ms a token
    forecast: list[float] = Field(default_factory=list)  # speedup with 1, 2, ... draft tokens
    best: int | None = None  # draft tokens; 0: do not speculate; None: unknown
    why_not: str = ""  # unknown


def advise(ours: LevelMeasurement, plain: LevelMeasurement | None) -> LevelAdvice:
    """For one load, by what was measured there. `plain`: the same model without drafts at the same load."""
    counts, token_ms, plain_ms = ours.speculation, _token_ms(ours), _token_ms(plain)
    found = LevelAdvice(level=ours.level, plain_pass_ms=plain_ms, measured=_ratio(plain_ms, token_ms))
    if counts is None or not counts.num_steps or counts.num_draft_tokens is None or counts.num_accepted_tokens is None:
        what = SILENT if counts is None or counts.num_steps else "a pass with a draft"
        found.why_not = what
        return found
    emitted = sum(answer.num_tokens or 0 for answer in ours.answers) - len(ours.answers)  # a first token comes with the prompt
    alone = max(0, emitted - counts.num_steps - counts.num_accepted_tokens)
    passes = counts.num_steps + alone  # of one request each; those without a draft emit one token
    per_pass = (counts.num_steps + counts.num_accepted_tokens + alone) / passes
    length, rows = counts.num_draft_tokens / passes, positions(counts)
    found.num_draft_tokens, found.tokens_per_pass = length, per_pass
    found.pass_ms = None if token_ms is None else token_ms * per_pass
    if plain_ms is None or found.pass_ms is None:
        found.why_not = PLAIN_NEEDED
    elif not rows:
        found.why_not = "acceptance by position, which the server does not count"
    else:
        cost, shares = found.pass_ms / plain_ms, [row.accepted / passes for row in rows]
        lengths = [k for k in range(1, len(rows) + 1) if k <= length + 1]
        found.forecast = [(1 + sum(shares[:k])) / (1 + (cost - 1) * k / length) for k in lengths]
        best = max(found.forecast)
        found.best = found.forecast.index(best) + 1 if best >= WORTH else 0
    return found


def schedule(rows: Sequence[LevelAdvice]) -> list[tuple[int, int]]:
    """(Requests in flight, draft tokens from so many on), the first at 1, never more than at fewer; empty: nothing is known."""
    known = sorted((one.level.concurrency, one.best) for one in rows if one.best is not None)
    table: list[tuple[int, int]] = []
    for number, best in known:
        if not table:
            table.append((1, best))
        elif best < table[-1][1]:
            table.append((number, best))
    return table


def _token_ms(level: LevelMeasurement | None) -> float | None:
    """Mean milliseconds of a token behind the first."""
    return None if level is None or level.tpot_s is None or not level.tpot_s.mean else 1000 * level.tpot_s.mean


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


class Standing(Record):
    """What the server's counters say of all its traffic since it started, and its load when the run began."""

    speculation: SpeculationCounts | None = None
    num_generated: int | None = None  # tokens
    running: float | None = None  # requests
    waiting: float | None = None
    cache_hits: float | None = None  # share of the prompt tokens looked up that the prefix cache had


class ServerResult(Result):
    """A server by its counters and clocks; `servers` ends with the one that was asked about, before it the plain one if any."""

    kind: Literal["server"] = "server"
    question: Literal["explain", "tune"]
    servers: list[ServerMeasurement]
    standing: Standing | None  # None: the server shows no counters
    advice: list[LevelAdvice] = Field(default_factory=list)  # of tune, by level
    table: list[tuple[int, int]] = Field(default_factory=list)  # of tune: (requests in flight, draft tokens from there on)
    findings: list[str] = Field(default_factory=list)
    unknown: list[str] = Field(default_factory=list)  # what a server cannot tell
    workload: str
    settings: dict[str, Any] = Field(default_factory=dict)
    seconds: float = 0.0

    @property
    def server(self) -> ServerMeasurement:
        """The one that was asked about."""
        return self.servers[-1]

    def comparable(self) -> Iterator[Comparable]:
        """Acceptance and speed at each load: before and after a change of the server."""
        for level in self.server.levels:
            name = level.level.label
            if level.tokens_per_s is not None:
                yield Comparable(f"{name}: tokens/s", Interval.unknown(level.tokens_per_s), True, "tokens/s")
            counts = level.speculation
            if counts is not None and counts.tau is not None:
                yield Comparable(f"{name}: tokens per pass with a draft", Interval.unknown(counts.tau), True)
            for row in positions(counts) if counts is not None else ():
                if row.given is not None:
                    label = f"{name}: accepted at position {row.position}, given the one before"
                    yield Comparable(label, row.given, True, scale="difference")
        yield from [
            Comparable(f"{one.level.label}: speedup", Interval.unknown(one.measured), True, "x")
            for one in self.advice if one.measured is not None
        ]  # fmt: skip
