"""What was run, as plain data from which everything else can be worked out again; and what is known about it: what the summary
counts and counterfactuals replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from outrider.drafters.base import Drafter
from outrider.drafters.composite import CompositeDrafter
from outrider.lab.explain.annotate import Labelled
from outrider.lab.explain.causes import judge_of
from outrider.lab.explain.distributions import FinishedText
from outrider.lab.explain.explain_result import Times
from outrider.lab.explain.forecast import Mode, TextWalk, walk_of
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.replay.replay import sum_stats
from outrider.lab.result import Interval
from outrider.lab.runner import Contender, Step
from outrider.sampling.confidence import ConfidenceSettings
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats

LONGEST = 12  # chains that are looked at, beyond the present one by
BEYOND = 4


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
        """Counts of the steps, without times."""
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


class Explained:
    """One configuration on all prompts so far. `times`: of its steps, once they are known."""

    def __init__(self, contender: Contender, params: SamplingParams, *, lossy: bool) -> None:
        self.contender, self.configuration, self.params = contender, contender.configuration, params
        self.texts: list[Labelled] = []
        self.recordings: list[RecordedPrompt] = []  # of the texts
        self.times: Times | None = None
        parts, decoder = self.configuration.parts(lossy=lossy), contender.built.decoder
        self.judge = judge_of(decoder.verifier, is_greedy=params.is_greedy)
        settings = parts.drafter_settings
        self.length = parts.length.max_nodes  # draft tokens of a step, at most
        self.is_mixed = isinstance(decoder.drafter, CompositeDrafter)  # several drafters share a step
        self.is_chain = not (parts.requirements.trees or parts.length.is_auto or self.is_mixed)  # of one length
        self.is_sure = _follows_its_distribution(decoder.drafter, settings)  # what a draft of any length would meet
        has_rule = isinstance(settings, ConfidenceSettings) and settings.stop != "none"
        self.stop: ConfidenceSettings | None = settings if has_rule else None  # a stop rule at work

    @property
    def per_text(self) -> list[DecodeStats]:
        return [one.stats for one in self.recordings]

    @cached_property
    def stats(self) -> DecodeStats:
        """Counters of all texts."""
        return sum_stats(self.per_text)

    @property
    def tau(self) -> Interval:
        return ratio_of_sums([one.emitted for one in self.per_text], [one.steps for one in self.per_text])

    @property
    def alpha(self) -> Interval | None:
        """None where nothing was tested."""
        tested = [one.tested for one in self.per_text]
        return ratio_of_sums([one.accepted for one in self.per_text], tested) if all(tested) else None

    @property
    def has_draft_probs(self) -> bool:
        """A model stands behind the draft, whose distribution is known at the positions of the texts."""
        return any(one.positions.has_draft_probs for one in self.texts)

    @property
    def is_guessed(self) -> bool:
        """Whether the draft's token at a position is known: greedy text, or noise shared with the target."""
        return self.params.is_greedy or self.judge.coupled

    @property
    def is_decided(self) -> bool:
        """Whether texts and guesses leave nothing to chance."""
        return self.is_guessed and self.is_sure

    @property
    def mode(self) -> Mode:
        """How a walk over the text keeps draft tokens."""
        if self.is_guessed:
            return "guessed"
        return "block" if self.judge.judges_paths else "token"

    @property
    def longest(self) -> int:
        """Draft tokens that counterfactuals look at."""
        return max(LONGEST, self.length + BEYOND)

    def walks(self) -> list[TextWalk]:
        """The texts step by step, with the draft's own guesses or draws."""
        return [walk_of(one.positions, self.mode, one.text.limit, self.stop) for one in self.texts]


def _follows_its_distribution(drafter: Drafter, settings: Any) -> bool:
    """Whether what it drafts is known from its model's distributions alone: neither other layers nor a trained rule decide."""
    whole = not getattr(settings, "skip_layers", "") and getattr(settings, "stop", "none") != "acceptance"
    return drafter.model is not None and whole
