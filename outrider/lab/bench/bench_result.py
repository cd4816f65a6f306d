"""The result of a bench run: cells, and in each of them every configuration.

Counts are stored and ratios derived from them; docs/bench.md, "What the numbers are", has the
formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Literal

import numpy as np
from pydantic import Field

from outrider.lab.result import Comparable, Interval, Record, Result
from outrider.lab.workload.types import Workload
from outrider.stats import PartStats

Ending = Literal["rounds", "budget", "interrupted"]
ENDINGS: dict[Ending, str] = {
    "rounds": "all rounds were run",
    "budget": "the time budget was spent",
    "interrupted": "you stopped it: more was to come",
}


class Percentiles(Record):
    """Percentiles of `n` values, linear between neighbours. With fewer than 100 values p99 is close
    to the largest."""

    n: int
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles | None:
        """Percentiles of the values that are not None; None where there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
        return cls(n=len(known), p50=p50, p90=p90, p99=p99)


class DepthAcceptance(Record):
    """Draft tokens by depth, from 1: index 0 is the first draft token."""

    num_steps: int  # that had a draft
    # steps whose draft went on at this depth, everything before it kept
    reached: list[int] = Field(default_factory=list)
    # of those, the ones where a token of this depth was kept
    kept: list[int] = Field(default_factory=list)

    @property
    def conditional(self) -> list[float | None]:
        """P(token at this depth kept | everything before it kept) = kept / reached."""
        return [
            kept / reached if reached else None
            for kept, reached in zip(self.kept, self.reached, strict=True)
        ]

    @property
    def per_position(self) -> list[float]:
        """Kept at this depth / steps that had a draft: what vLLM prints."""
        return [kept / self.num_steps for kept in self.kept]

    @property
    def survival(self) -> list[float]:
        """S(i) = c_1 ... c_i, the product-limit estimate (Kaplan & Meier 1958): drafts of different
        lengths count as far as they go."""
        return list(accumulate((share or 0.0 for share in self.conditional), mul))


class AcceptanceLengths(Record):
    """Tokens per step in the three ways in which they are quoted, the target's own token included.

    With c_i tokens in v_i steps of run i: mean of c_i / v_i; the same weighted by c_i; Σ c / Σ v.
    """

    mean_of_requests: float  # SPEED-Bench's
    by_tokens: float
    pooled: float  # τ; AIPerf's, accepted / drafts + 1

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]]) -> AcceptanceLengths:
        """From (tokens, steps) of each run."""
        tokens = sum(count for count, _ in runs)
        steps = sum(num_steps for _, num_steps in runs)
        weighted = sum(count * count / num_steps for count, num_steps in runs)
        return cls(
            mean_of_requests=sum(count / num_steps for count, num_steps in runs) / len(runs),
            by_tokens=weighted / tokens,
            pooled=tokens / steps,
        )


class TurnMeasured(Record):
    """One turn of the conversations of a cell."""

    turn: int  # from 1
    num_runs: int
    num_tokens: int
    num_steps: int
    mean_prompt_tokens: float
    tokens_per_s: Interval | None
    speedup: Interval | None = None  # None: plain, or nothing to compare

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return self.num_tokens / self.num_steps


class RunRecord(Record):
    """One run of the first round as it went, for files of other benchmarks."""

    prompt: int  # its number in the cell
    text: str
    tokens: list[int]  # of each step
    times_s: list[float]  # the end of each step, from when the run began


class Parting(Record):
    """The first difference between a text and the plain one."""

    position: int  # output token, from 0
    plain: list[int]  # token ids from there on
    own: list[int]


class Divergence(Parting):
    """The first text that parts."""

    prompt: str  # its id
    plain_text: str
    own_text: str


class Identity(Record):
    """Whether texts are the plain ones, token by token."""

    num_compared: int
    num_identical: int
    # mean length of the beginnings that are the same; None: all is, or an older version measured
    equal_tokens: float | None = None
    first: Divergence | None = None


class Accuracy(Record):
    """Answers that are right, over the prompts whose answers were complete on both sides."""

    num_graded: int
    # prompts with a right answer whose text was cut off on either side: not graded
    num_incomplete: int
    num_right: int
    num_plain_right: int
    # McNemar's exact test on the prompts that only one side answered rightly
    p_value: float | None = None


class Measured(Record):
    """One configuration in one cell, all rounds together."""

    configuration: int
    num_runs: int  # prompts times rounds
    num_tokens: int
    num_steps: int
    drafted: int
    tested: int
    accepted: int
    # by part of a composite, and of forced tokens; empty where the drafter alone drafts
    parts: dict[str, PartStats] = Field(default_factory=dict)
    num_disturbed: int  # runs alongside busy neighbours, the repeats included
    # mean share of the processors that others used during its runs; None: not recorded
    other_cpu: float | None = None
    speedup: Interval | None = None  # decode phase; None: plain, or nothing to compare
    end_to_end: Interval | None = None  # prompt and queue included
    # of one row's decode phase: tokens / seconds, after its first step
    tokens_per_s: Interval | None
    throughput_tokens_per_s: float  # all rows together, prompts included
    ttft_s: Percentiles | None = None
    tpot_s: Percentiles | None = None  # per run: seconds after the first step / tokens after it
    # from one step of a row to its next: how long a reader waits for more
    chunk_s: Percentiles | None = None
    # by phase; the sum is the wall time of all runs
    time_s: dict[str, float] = Field(default_factory=dict)
    acceptance: DepthAcceptance | None = None  # None: nothing was drafted
    acceptance_lengths: AcceptanceLengths | None = None  # None: an older version measured
    # tokens that a step emitted -> steps
    tokens_per_step: dict[int, int] = Field(default_factory=dict)
    by_turn: list[TurnMeasured] = Field(default_factory=list)  # empty: no conversations
    runs: list[RunRecord] = Field(default_factory=list)  # empty unless asked for
    # tokens per second / those of a plain pass that reads its bytes at full bandwidth
    roof: float | None = None
    # draft nodes of the widest row -> median seconds, all rows running
    step_s: dict[int, float] = Field(default_factory=dict)
    identity: Identity | None = None  # None: sampled texts, which differ by design
    accuracy: Accuracy | None = None

    @property
    def tau(self) -> float:
        """Tokens per target pass, correction or bonus token included."""
        return self.num_tokens / self.num_steps

    @property
    def alpha(self) -> float | None:
        """Accepted / tested."""
        return self.accepted / self.tested if self.tested else None

    @property
    def draft_utilisation(self) -> float | None:
        """Accepted / drafted: what vLLM calls the acceptance rate."""
        return self.accepted / self.drafted if self.drafted else None


class OtherProcesses(Record):
    """The share of the processors that other processes used, 0..1, during the runs that count."""

    mean: float
    highest: float
    allowed: float  # a run during which others used more is disturbed
    num_runs: int
    num_disturbed: int
    num_repeated: int  # runs that are the calmest of several attempts


@dataclass(frozen=True)
class CellKey:
    """A cell's name."""

    task: str
    temperature: float
    batch_size: int
    context: int | None  # None: prompts as they are

    @property
    def key(self) -> str:
        """The cell's name in the journal."""
        return f"{self.task} | T {self.temperature:g} | batch {self.batch_size} | context {self.context or 'own'}"

    @property
    def label(self) -> str:
        """The cell's name in reports."""
        words = [self.task, f"T = {self.temperature:g}"]
        words += [f"{self.batch_size} at once"] if self.batch_size > 1 else []
        words += [] if self.context is None else [f"context {self.context}"]
        return ", ".join(words)


class Cell(Record):
    """A task at a temperature, a batch size and a context length."""

    task: str
    temperature: float
    batch_size: int
    # tokens that every prompt was filled up or cut to; None: prompts as they are
    context: int | None
    prompt_ids: list[str]
    # turn of its conversation and question of each prompt; empty unless runs were asked for
    questions: list[tuple[int, str]] = Field(default_factory=list)
    mean_prompt_tokens: float
    max_new_tokens: int
    rounds: int  # begun
    ended_by: Ending
    seconds: float  # spent on it
    # configurations that could not run here, and why
    failures: dict[str, str] = Field(default_factory=dict)
    others: OtherProcesses | None = None  # None: nothing ran
    configurations: list[Measured]

    @property
    def label(self) -> str:
        return CellKey(self.task, self.temperature, self.batch_size, self.context).label

    def measured(self, configuration: int) -> Measured | None:
        """The measurements of one configuration; None where it could not run."""
        return next(
            (entry for entry in self.configurations if entry.configuration == configuration), None
        )


class ConfigurationInfo(Record):
    """A configuration and what it costs to have."""

    label: str
    arguments: dict[str, Any]  # of outrider.LLM
    resolved: dict[str, Any] = Field(default_factory=dict)  # the same with every default filled in
    baseline: int  # the plain configuration that it is compared with: itself, where it is plain
    # from texts, or lengths follow the clock: a fresh start in every cell and round, no run twice
    learns: bool = False
    lossless: bool = True
    # greedy texts are the plain ones to the bit on this machine, else up to rounding
    exact: bool = True
    added_weights_bytes: int | None = None  # alongside the target; None: not known
    added_kv_bytes_per_token: int | None = None
    notes: list[str] = Field(default_factory=list)
    failure: str | None = None  # why it could not be built


class TargetInfo(Record):
    """The bytes that plain decoding has to read."""

    name: str  # as the user named it
    draft: str | None = None
    dtype: str
    quantise: int | None = None  # bits that its linear layers were rounded to on loading
    device: str
    runtime: str  # native, graphs or eager
    threads: int
    context: int  # tokens that prompt and answer may have together
    weights_bytes: int | None
    pass_bytes: int | None  # weights that each pass reads; None: not known (mixtures of experts)
    kv_bytes_per_token: int
    bandwidth_bytes_per_s: float | None  # measured, reading


class WorkloadInfo(Record):
    """The origin of the prompts."""

    name: str
    notes: list[str] = Field(default_factory=list)
    num_skipped_lines: int = 0

    @classmethod
    def of(cls, workload: Workload) -> WorkloadInfo:
        return cls(
            name=workload.name, notes=list(workload.notes), num_skipped_lines=len(workload.skipped)
        )


class SpeculationCounts(Record):
    """A server's counters of its speculative steps. Those it does not have are None."""

    num_steps: int  # target passes that had a draft to verify
    num_tokens: int  # that these passes emitted, correction or bonus token included
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    # steps in which draft token i + 1 was accepted
    accepted_per_position: list[int] = Field(default_factory=list)

    @property
    def tau(self) -> float | None:
        """Tokens per step that had a draft."""
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def draft_utilisation(self) -> float | None:
        """Accepted / drafted: what vLLM calls the acceptance rate."""
        if self.num_accepted_tokens is None or not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens


class MeasuredAnswer(Record):
    """One request that a server answered to its end. Times are the client's, from just before it is
    sent."""

    id: str
    task: str = "other"
    seconds: float  # until the end of the text
    ttft_s: float | None  # to the first chunk with text; None for an answer without any
    # events of the stream that carry text: under speculation often several tokens each
    num_chunks: int
    num_tokens: int | None  # as the server counts them; None where it does not say
    num_cached: int | None = None  # tokens of the prompt that it had read before; likewise
    text: str  # reasoning and content as they came
    content: str | None = None  # without the reasoning; None: there was none
    turn: int = 1  # of its conversation

    @property
    def reply(self) -> str:
        """The text that the next turn of a conversation has before it."""
        return self.text if self.content is None else self.content

    @property
    def tpot_s(self) -> float | None:
        """(seconds − time to first token) / (tokens − 1)."""
        if self.ttft_s is None or self.num_tokens is None or self.num_tokens < 2:
            return None
        return (self.seconds - self.ttft_s) / (self.num_tokens - 1)


class ServerComparison(Record):
    """A server against the plain one, over the requests that both answered."""

    baseline: str  # its label
    num_pairs: int
    speedup: Interval | None  # tokens/s of a request, here / there: sums over the pairs
    # ids of the greedy answers that differ; None when texts were sampled
    differing: list[str] | None = None


class ServerMeasurement(Record):
    """One server under one load."""

    label: str
    url: str  # as the user wrote it
    engine: str  # whose counters it shows; "": no known ones
    model: str
    concurrency: int  # requests in flight
    num_requests: int  # asked for: answered, failed, or never sent
    answers: list[MeasuredAnswer]
    failures: list[str] = Field(default_factory=list)  # "request: what went wrong"
    # tokens of all answers / seconds in which requests ran; None where they are not counted
    tokens_per_s: float | None
    request_s: Percentiles | None
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    speculation: SpeculationCounts | None = None  # by its counters: everything it did meanwhile
    comparison: ServerComparison | None = None
    notes: list[str] = Field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every request was answered."""
        return len(self.answers) == self.num_requests


class BenchResult(Result):
    """The result of `bench`, measured here (`target`, `cells`) or at servers (`servers`)."""

    kind: Literal["bench"] = "bench"
    workload: WorkloadInfo
    settings: dict[str, Any] = Field(default_factory=dict)  # the plan
    target: TargetInfo | None = None
    configurations: list[ConfigurationInfo] = Field(default_factory=list)
    cells: list[Cell] = Field(default_factory=list)
    servers: list[ServerMeasurement] = Field(default_factory=list)
    seconds: float = Field(ge=0)  # of measuring, loading not included

    def comparable(self) -> Iterator[Comparable]:
        """Speeds and speedups of every cell and configuration, and what greedy decoding must repeat
        exactly."""
        for cell in self.cells:
            for entry in cell.configurations:
                label = f"{cell.label}: {self.configurations[entry.configuration].label}"
                for name, interval, unit in (
                    ("tokens/s", entry.tokens_per_s, "tokens/s"),
                    ("speedup", entry.speedup, "x"),
                    ("end-to-end speedup", entry.end_to_end, "x"),
                ):
                    if interval is not None:
                        yield Comparable(f"{label}: {name}", interval, True, unit)
                if entry.identity is not None:
                    share = entry.identity.num_identical / entry.identity.num_compared
                    yield Comparable(f"{label}: identical texts", share, True, scale="difference")
        for server in self.servers:
            if server.tokens_per_s is not None:
                speed = Interval.unknown(server.tokens_per_s)
                yield Comparable(f"{server.label}: tokens/s", speed, True, "tokens/s")
