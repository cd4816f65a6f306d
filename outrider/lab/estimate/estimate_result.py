"""The result of `outrider estimate`."""

from __future__ import annotations

from typing import Literal

from outrider.lab.predict import SpeedPrediction, StepCosts
from outrider.lab.result import Record, Result


class LengthEstimate(SpeedPrediction):
    """The speedup of one draft length, and its requirements."""

    break_even_alpha: float | None  # equal at all positions; None: no alpha pays
    experts: float | None = None  # distinct ones that its pass reads; None: not known


class ModelSize(Record):
    """The memory that one model takes."""

    role: Literal["target", "draft"]
    name: str  # as the user named it
    weights_bytes: int
    kv_bytes_per_token: int


class Mixture(Record):
    """The experts of a target."""

    experts: int  # of a layer
    active: int  # that a token names
    expert_share: float  # of the weights that a pass over very many tokens reads

    def distinct(self, num_tokens: int) -> float:
        """Expected distinct experts of a layer that tokens name independently of one another."""
        missed = (1 - self.active / self.experts) ** num_tokens
        return self.experts * (1 - missed)

    def pass_cost(self, num_tokens: int) -> float:
        """Bytes of a pass over so many tokens / of one over a single token."""
        wide, plain = (
            1 - self.expert_share + self.expert_share * self.distinct(count) / self.experts
            for count in (num_tokens, 1)
        )
        return wide / plain

    @property
    def plain_share(self) -> float:
        """Share of the experts in the bytes of a pass over a single token."""
        read = self.expert_share * self.active / self.experts
        return read / (1 - self.expert_share + read)


class EstimateResult(Result):
    """The formula's answer for all draft lengths."""

    kind: Literal["estimate"] = "estimate"
    source: str  # where the costs come from
    # P(token i kept | the ones before it kept); the last one holds for all after it
    acceptance: list[float]
    costs: StepCosts  # in seconds, or in plain passes
    lengths: list[LengthEstimate]  # k = 0, 1, ...
    best: int  # the length with the highest speedup; 0: do not speculate
    by_alpha: dict[float, list[float]]  # alpha, equal at all positions -> speedups of k = 0, 1, ...
    memory: list[ModelSize]
    mixture: Mixture | None = None  # the target's experts; None: it has none, or none was named
