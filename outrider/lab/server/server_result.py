"""What `outrider explain URL` and `outrider tune URL` found."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.lab.result import Comparable, Interval, Record, Result
from outrider.lab.server.lengths import LevelAdvice, positions
from outrider.lab.server.types import ServerMeasurement, SpeculationCounts


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

    def comparable(self) -> list[Comparable]:
        """Acceptance and speed at each load: before and after a change of the server."""
        found = []
        for level in self.server.levels:
            name = level.level.label
            if level.tokens_per_s is not None:
                found.append(Comparable(f"{name}: tokens/s", Interval.unknown(level.tokens_per_s), True, "tokens/s"))
            counts = level.speculation
            if counts is not None and counts.tau is not None:
                found.append(Comparable(f"{name}: tokens per pass with a draft", Interval.unknown(counts.tau), True))
            for row in positions(counts) if counts is not None else ():
                if row.given is not None:
                    label = f"{name}: accepted at position {row.position}, given the one before"
                    found.append(Comparable(label, row.given, True, scale="difference"))
        found += [
            Comparable(f"{one.level.label}: speedup", Interval.unknown(one.measured), True, "x")
            for one in self.advice if one.measured is not None
        ]  # fmt: skip
        return found
