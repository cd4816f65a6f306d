"""What `outrider reasoning` found: one `TemperatureStudy` per temperature, and what they have in common.

Shares and ratios are sums over sums, their intervals resample problems. Positions in a draft count from 1. "At γ" always means
draft tokens asked for per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from outrider.lab.bench.result import Accuracy, Ending, Identity, Speedup, WorkloadInfo
from outrider.lab.comparable import Comparable
from outrider.lab.explain.result import Confusion
from outrider.lab.result import Interval, Record, Result

Role = Literal["length", "idea"]


class KindAcceptance(Record):
    """Tokens of one kind of step, in the recording at the longest length; "all": every token."""

    kind: str  # outrider.lab.reasoning.kinds.KINDS, or "all"
    tokens: int
    tested: int
    kept: int
    alpha: Interval | None  # kept / tested; None where nothing was tested
    overlap: float | None  # mean over all its positions of sum_v min(p, q), at temperature 1 where decoding is greedy
    starts: int  # steps that begin at a token of this kind
    survival: list[Interval]  # of those: P(at least 1, 2, ... draft tokens are kept); as long as steps got there
    by_position: list[float | None]  # kept / tested of the tokens of this kind that stood at position 1, 2, ... of a draft


class KindRejections(Record):
    """Draft tokens of one kind that were rejected, in the same recording; "all": every one."""

    kind: str
    count: int
    reasons: dict[str, int]  # greedy: outrider.lab.reasoning.rejections.REASONS -> rejections; empty where tokens are drawn
    lost: dict[str, float]  # outrider.lab.explain.causes.CAUSES -> tokens; without those that lost nothing
    confusions: list[Confusion]  # the commonest pairs
    target_entropy: float | None  # nats, mean at rejections
    draft_entropy: float | None
    target_entropy_kept: float | None  # the same where draft tokens were kept
    draft_entropy_kept: float | None


class LengthEstimate(Record):
    """Drafts of one length, forecast; 0 is plain decoding. Speedups are over plain decoding."""

    num_draft_tokens: int
    step_s: float  # measured on runs of their own, fitted so that more tokens do not cost less
    alpha_tau: float  # (1 - alpha^(γ+1)) / (1 - alpha)
    alpha_speedup: float  # alpha_tau / (γ c + 1): Leviathan et al., Theorem 3.8
    survival_tau: float  # 1 + S(1) + ... + S(γ), from steps of the longest length
    survival_speedup: float  # survival_tau x plain step_s / step_s
    replay_tau: float  # of steps of this length on the recorded texts, ends of texts included
    replay_speedup: float  # the same behind each text's first step, where speeds are measured, x plain step_s / step_s


class Contestant(Record):
    """One configuration, measured in turn with all others."""

    configuration: str
    role: Role  # a draft length to confirm, or an idea to improve on the best of them
    what: str = ""  # an idea, in words
    num_draft_tokens: int | None = None  # of a fixed length
    exact: bool = True  # greedy texts are the plain ones to the bit on this machine, else up to rounding
    failure: str = ""  # why it could not run; everything else is empty then
    num_problems: int = 0
    tau: Interval | None = None  # tokens per target pass
    alpha: float | None = None  # accepted / tested
    drafted: float | None = None  # draft tokens per step
    tokens_per_s: float | None = None  # behind each text's first step
    speedup: Speedup | None = None  # over plain decoding, over the same tokens
    over_best: Speedup | None = None  # seconds per token of the best length / its own; None for that length itself
    identity: Identity | None = None  # greedy texts against plain decoding's
    accuracy: Accuracy | None = None


class TemperatureStudy(Record):
    """Everything at one temperature."""

    temperature: float
    texts: int
    unfinished: int  # texts that the length limit ended
    tokens: int
    steps: int  # of the recording at the longest length
    kinds: list[KindAcceptance]  # "all" first
    rejections: list[KindRejections]  # "all" first
    c: float  # seconds of drafting a token / seconds of a plain step
    estimates: list[LengthEstimate]  # γ = 0, 1, ...
    best: int  # γ of the highest replay_speedup; 0: plain decoding
    tried: int  # the same among γ > 0
    contestants: list[Contestant]
    rounds: int
    ended_by: Ending
    other_cpu: float  # highest share of the processors that others used during a measured run

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def label(self) -> str:
        return "greedy" if self.is_greedy else f"T = {self.temperature:g}"

    @property
    def reference(self) -> Contestant | None:
        """The length that the ideas are compared with; None where it could not run."""
        lengths = [one for one in self.contestants if one.num_draft_tokens == self.tried and one.role == "length"]
        return next((one for one in lengths if one.speedup is not None), None)


class Example(Record):
    """One solution of the recording, token by token."""

    id: str
    prompt: str
    pieces: list[str]
    fates: list[str]  # "accepted", "correction", "bonus" or "plain"
    kinds: list[str]
    rejected: list[str]  # the draft token that the correction replaced; empty elsewhere


class ReasoningResult(Result):
    """`outrider reasoning`."""

    kind: Literal["reasoning"] = "reasoning"
    target: str
    draft: str | None
    workload: WorkloadInfo
    problems: int
    max_new_tokens: int
    longest: int  # γ of the recordings
    runtime: str  # native, graphs or eager
    dtype: str
    device: str
    threads: int
    studies: list[TemperatureStudy]
    example: Example | None = None
    seconds: float = Field(ge=0)  # of everything but loading; a resumed run's own

    def comparable(self) -> list[Comparable]:
        """Acceptance by kind and speedups by configuration, at each temperature."""
        return [found for study in self.studies for found in _comparables(study)]


def _comparables(study: TemperatureStudy) -> Iterator[Comparable]:
    for kind in study.kinds:
        if kind.alpha is not None:
            yield Comparable(f"{study.label}: α, {kind.kind}", kind.alpha, higher_is_better=True)
    for one in study.contestants:
        if one.speedup is not None:
            value = one.speedup.interval or Interval(value=one.speedup.value, low=0.0, high=math.inf)
            yield Comparable(f"{study.label}: {one.configuration}: speedup", value, higher_is_better=True, unit="x")
        if one.tau is not None:
            yield Comparable(f"{study.label}: {one.configuration}: τ", one.tau, higher_is_better=True)
