"""What is known after a server was measured: plain records, embedded in a bench result and kept in its journal.

Times are a client's: seconds from just before a request is sent to the arrival of a chunk. A chunk is one event of the stream
that carries text; under speculation it often carries several tokens.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Literal

from pydantic import Field

from outrider.lab.result import Interval, Record

FailureKind = Literal["refused", "dropped", "timeout", "status", "malformed", "aborted"]


class Level(Record):
    """How hard the server is pressed: so many requests at once, a new one as soon as one ends."""

    concurrency: int = Field(ge=1)

    @property
    def label(self) -> str:
        return f"{self.concurrency} at once"


class SpeculationCounts(Record):
    """Counts of speculative steps, from a server's counters. What it does not say is None."""

    num_steps: int | None = None  # target passes that had a draft to verify
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_full_steps: int | None = None  # steps that kept their whole draft
    num_step_tokens: int | None = None  # tokens those steps emitted, where a server counts these and not the accepted ones
    accepted_per_position: list[int] = Field(default_factory=list)  # steps in which draft token i + 1 was accepted

    @property
    def tau(self) -> float | None:
        """Tokens per step that had a draft, correction or bonus token included; `tau_formula` says how."""
        if not self.num_steps:
            return None
        if self.num_accepted_tokens is not None:
            return 1 + self.num_accepted_tokens / self.num_steps
        return None if self.num_step_tokens is None else self.num_step_tokens / self.num_steps

    @property
    def tau_formula(self) -> str:
        if self.num_accepted_tokens is None and self.num_step_tokens is not None:
            return "(generated − requests) / verify calls"
        return "1 + accepted / drafts"

    @property
    def alpha(self) -> float | None:
        """Accepted / tested. Tested = accepted + steps that rejected something, so it needs to be known which did not."""
        if self.num_accepted_tokens is None or self.num_steps is None or self.num_full_steps is None:
            return None
        tested = self.num_accepted_tokens + self.num_steps - self.num_full_steps
        return self.num_accepted_tokens / tested if tested else None

    @property
    def draft_utilisation(self) -> float | None:
        """Accepted / drafted: what vLLM calls the acceptance rate."""
        if self.num_accepted_tokens is None or not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        """Both together. A count that one of them lacks is unknown of the sum."""
        names = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_full_steps", "num_step_tokens")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        sums = {name: None if None in pair else sum(pair) for name, pair in pairs.items()}
        unknown = any(one.num_steps != 0 and not one.accepted_per_position for one in (self, other))
        columns = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SpeculationCounts(**sums, accepted_per_position=[] if unknown else [sum(column) for column in columns])


class MeasuredAnswer(Record):
    """One request that was answered to its end."""

    id: str
    task: str = "other"
    window: int = 0  # number of its turn: an uninterrupted stretch of work
    start_s: float = 0.0  # since the window began
    chunks_s: list[float]  # arrival of each chunk since the request was sent
    seconds: float  # until the last chunk or the end of the text, whichever came last; the usage that follows is not waited for
    text: str  # reasoning and content as they came
    finish_reason: str | None = None
    num_tokens: int | None = None  # as the server counted; None where it does not say
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None  # prompt tokens found in the server's prefix cache

    @property
    def ttft_s(self) -> float | None:
        """To the first chunk; None for an answer without text."""
        return self.chunks_s[0] if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """(seconds − time to first token) / (tokens − 1)."""
        if self.ttft_s is None or self.num_tokens is None or self.num_tokens < 2:
            return None
        return (self.seconds - self.ttft_s) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between one chunk and the next."""
        return [after - before for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)]


class Failure(Record):
    """One request that was not."""

    id: str
    kind: FailureKind
    message: str  # one line for a person
    status: int | None = None  # of HTTP
    num_chunks: int = 0  # that had come before it failed


class Percentiles(Record):
    """Percentiles of `n` values, linear between neighbours (NumPy's default). With fewer than 100 values p99 is close to
    the largest."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float


class LevelMeasurement(Record):
    """One server at one level."""

    level: Level
    num_requests: int  # asked for; finished + failed + never sent
    answers: list[MeasuredAnswer]
    failures: list[Failure] = Field(default_factory=list)
    busy_s: float  # sum over windows, each from its first request to its last answer
    tokens_per_s: float | None  # tokens of all answers / busy_s; None where the server does not count tokens
    requests_per_s: float | None
    tokens_per_chunk: float | None
    request_s: Percentiles | None
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    gap_s: Percentiles | None  # of all gaps between chunks of all answers (inter-token latency, as a reader sees it)
    speculation: SpeculationCounts | None = None  # the server's counters over this level: everything it did meanwhile
    gauges: dict[str, float] = Field(default_factory=dict)  # the server's running averages afterwards; they reach further back
    notes: list[str] = Field(default_factory=list)


class AnswerDifference(Record):
    """Two greedy texts that part."""

    id: str
    position: int  # of the first character that differs
    baseline: str  # what follows there
    other: str


class LevelComparison(Record):
    """A server against the baseline at one level, over the requests that both answered."""

    level: Level
    num_pairs: int
    speedup: Interval | None  # tokens/s of a request, here / baseline: sums over the pairs; uncounted, those of one text
    throughput_ratio: float | None  # tokens_per_s here / baseline
    num_identical: int | None = None  # texts; None when texts were sampled
    differences: list[AnswerDifference] = Field(default_factory=list)  # the first ones


class ServerInfo(Record):
    """What a server says about itself."""

    engine: str  # vllm, sglang, llamacpp, outrider, or what it calls itself
    version: str | None = None
    model: str
    metrics: bool  # whether /metrics can be read
    notes: list[str] = Field(default_factory=list)


class ServerMeasurement(Record):
    """One server at all levels. `comparisons`: against `baseline`, the first server of the same run."""

    label: str
    url: str  # as the user wrote it
    server: ServerInfo
    levels: list[LevelMeasurement]
    baseline: str | None = None
    comparisons: list[LevelComparison] = Field(default_factory=list)
    complete: bool  # every request of every level was sent and answered or refused by the server
    interrupted: bool = False  # Ctrl-C ended the run
    notes: list[str] = Field(default_factory=list)
