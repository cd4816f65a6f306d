"""What decoding one prompt leaves behind: plain data, from which everything else can be worked out again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.lab.explain.distributions import FinishedText
from outrider.lab.recording import Step
from outrider.lab.runner import Contender
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats


@dataclass(frozen=True)
class Question:
    """One prompt, as token ids."""

    tokens: Sequence[int]
    id: str = ""  # unique in its run
    task: str = "other"
    max_tokens: int | None = None  # fewer than the run's, where its log asked for fewer


@dataclass(frozen=True)
class RecordedPrompt:
    """One prompt's run."""

    output: list[int]
    origins: list[str]  # per token: "accepted", "correction", "bonus" or "plain"
    steps: list[Step]
    seed: int
    other_cpu: float = 0.0  # share of the processors that others used meanwhile, 0..1

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RecordedPrompt:
        return cls(**{**data, "steps": [Step(**step) for step in data["steps"]]})

    @property
    def stats(self) -> DecodeStats:
        """Counters, no times."""
        stats = DecodeStats()
        for step in self.steps:
            stats.count_step(len(step.tokens), min(step.taken, len(step.path)), step.taken, rejected=not step.complete)
        return stats


def record(contender: Contender, question: Question, params: SamplingParams) -> RecordedPrompt:
    """Decode one prompt."""
    trace = contender.run([list(question.tokens)], params)[0]
    done = trace.completion
    return RecordedPrompt(list(done.token_ids), list(done.origins), trace.steps, done.seed, trace.other_cpu)


def finished_text(contender: Contender, question: Question, recording: RecordedPrompt, params: SamplingParams) -> FinishedText:
    """The emitted tokens, and how they were sampled."""
    return FinishedText(
        prompt=list(question.tokens), output=recording.output, params=params,
        limit=params.limit(contender.built.context - len(question.tokens)), seed=recording.seed,
        coupled=contender.built.decoder.verifier.coupled, step_lengths=[step.taken for step in recording.steps],
    )  # fmt: skip


def params_of(params: SamplingParams, question: Question, number: int) -> SamplingParams:
    """Sampling parameters of the number-th prompt: each sampled one has a seed of its own."""
    max_tokens = params.max_tokens if question.max_tokens is None else params.limit(question.max_tokens)
    if params.is_greedy or params.seed is None:
        return replace(params, max_tokens=max_tokens)
    return replace(params, max_tokens=max_tokens, seed=(params.seed + number) % 2**64)
