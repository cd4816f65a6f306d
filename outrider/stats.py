"""Counters and seconds of one generation, which add up; every ratio is derived when it is read.

Definitions (docs/glossary.md): tau = emitted / steps, the bonus or correction token included, so
plain decoding is 1.0; alpha = accepted / tested, where a draft token is tested when the verifier
got as far as deciding on it; draft_utilisation = accepted / drafted (what vLLM prints as acceptance
rate). The first step's tokens are what the time to first token pays for, one or several; the tokens
after them are decoded: tpot = decode_s / (emitted - first_tokens).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

PHASES = ("draft", "target", "verify", "other")


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(frozen=True)
class PartStats:
    """Counters of one part of the drafts: of a composite's drafter, or of forced tokens."""

    steps: int = 0  # in which it drafted something
    drafted: int = 0
    accepted: int = 0

    def plus(self, other: PartStats) -> PartStats:
        """The sum of both."""
        return PartStats(
            self.steps + other.steps, self.drafted + other.drafted, self.accepted + other.accepted
        )


def count_parts(parts: Sequence[str], kept: Collection[int]) -> dict[str, PartStats]:
    """One step of one row by part. `parts`: of each node; `kept`: nodes that went into the text."""
    drafted = Counter(parts)
    accepted = Counter(parts[node] for node in kept)
    return {part: PartStats(1, count, accepted[part]) for part, count in drafted.items()}


def sum_parts(*each: Mapping[str, PartStats]) -> dict[str, PartStats]:
    """The sums by part."""
    total: dict[str, PartStats] = {}
    for parts in each:
        for part, counts in parts.items():
            total[part] = total.get(part, PartStats()).plus(counts)
    return total


@dataclass
class DecodeStats:
    """Counters of one completion, or the sum over several.

    steps                  target passes that emitted something
    emitted                tokens added to the text
    drafted                draft tokens submitted to the target
    tested                 of those, decided on: the accepted ones and the first rejected one of each step
    accepted               of those, kept
    accepted_per_position  [i]: steps whose (i+1)-th draft token was accepted
    experts                distinct experts that its passes read, the mean of the layers, summed over steps;
                           0: the target is no mixture, or its runtime does not tell
    parts                  by part, where drafts have several: of a composite, or with forced tokens
    answers                answers that emitted something
    first_tokens           of the emitted: those of each answer's first step
    ttft_s                 seconds from the request to its first step's tokens, prefill included; of several
                           answers the sum
    decode_s               seconds from the first step's tokens to the last token
    time_s                 seconds in each phase of the steps: "draft", "target", "verify", "other"
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    experts: float = 0.0
    parts: dict[str, PartStats] = field(default_factory=dict)
    answers: int = 0
    first_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    time_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def tau(self) -> float | None:
        """Emitted tokens per target pass. None before the first pass, as of an answer that was
        interrupted there."""
        return _ratio(self.emitted, self.steps)

    @property
    def alpha(self) -> float | None:
        """Accepted of the tested draft tokens. None where none was tested."""
        return _ratio(self.accepted, self.tested)

    @property
    def draft_utilisation(self) -> float | None:
        """Accepted of the drafted tokens. None where nothing was drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def experts_per_pass(self) -> float | None:
        """Distinct experts that a pass read, the mean of its layers. None where that is not known."""
        return _ratio(self.experts, self.steps) or None

    @property
    def tokens_per_s(self) -> float | None:
        """Emitted tokens per second from the request to the last token, reading the prompt
        included."""
        return _ratio(self.emitted, self.ttft_s + self.decode_s)

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean time to first token of the answers."""
        return _ratio(self.ttft_s, self.answers)

    @property
    def decode_tokens(self) -> int:
        """Tokens emitted after each answer's first step."""
        return self.emitted - self.first_tokens

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second after the first step. None for an answer of a single step."""
        return _ratio(self.decode_tokens, self.decode_s) if self.decode_tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: seconds per token after the first step. None for an answer of a
        single step."""
        return _ratio(self.decode_s, self.decode_tokens)

    def count_step(self, drafted: int, accepted: int, emitted: int, *, rejected: bool) -> None:
        """Record one step of one row. `accepted` counts draft tokens that ended up in the text;
        `rejected`: the verifier then turned down what the draft had next (in a tree: all of it,
        which counts as one test)."""
        if self.steps == 0:
            self.answers = 1
            self.first_tokens = emitted
        self.steps += 1
        self.emitted += emitted
        self.drafted += drafted
        self.accepted += accepted
        self.tested += accepted + (rejected and emitted > accepted)
        missing = accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def count_parts(self, parts: Sequence[str], kept: Collection[int]) -> None:
        """Record whose nodes the drafts of one step were (`count_parts`)."""
        self.parts = sum_parts(self.parts, count_parts(parts, kept))

    def merge(self, other: DecodeStats) -> DecodeStats:
        """The sum of both, as a new object."""
        width = max(len(self.accepted_per_position), len(other.accepted_per_position))
        mine, theirs = (
            s.accepted_per_position + [0] * (width - len(s.accepted_per_position))
            for s in (self, other)
        )
        return DecodeStats(
            steps=self.steps + other.steps,
            emitted=self.emitted + other.emitted,
            drafted=self.drafted + other.drafted,
            tested=self.tested + other.tested,
            accepted=self.accepted + other.accepted,
            accepted_per_position=[a + b for a, b in zip(mine, theirs, strict=True)],
            experts=self.experts + other.experts,
            parts=sum_parts(self.parts, other.parts),
            answers=self.answers + other.answers,
            first_tokens=self.first_tokens + other.first_tokens,
            ttft_s=self.ttft_s + other.ttft_s,
            decode_s=self.decode_s + other.decode_s,
            time_s={phase: self.time_s[phase] + other.time_s[phase] for phase in PHASES},
        )

    def as_dict(self) -> dict[str, object]:
        """Plain JSON form: the counters and the ratios derived from them."""
        return {
            "steps": self.steps,
            "emitted": self.emitted,
            "drafted": self.drafted,
            "tested": self.tested,
            "accepted": self.accepted,
            "tau": self.tau,
            "alpha": self.alpha,
            "draft_utilisation": self.draft_utilisation,
            "accepted_per_position": self.accepted_per_position,
            "experts_per_pass": self.experts_per_pass,
            "parts": {part: asdict(counts) for part, counts in self.parts.items()},
            "first_tokens": self.first_tokens,
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "tpot_s": self.tpot_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "tokens_per_s": self.tokens_per_s,
            "time_s": dict(self.time_s),
        }
