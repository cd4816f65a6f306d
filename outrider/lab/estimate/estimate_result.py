"""What `outrider estimate` answers."""

from __future__ import annotations

from typing import Literal

from outrider.lab.predict import SpeedPrediction, StepCosts
from outrider.lab.result import Record, Result


class LengthEstimate(SpeedPrediction):
    """What one draft length brings, and what it needs."""

    break_even_alpha: float | None  # equal at all positions; None: no alpha pays


class ModelSize(Record):
    """What one model takes of the memory."""

    role: Literal["target", "draft"]
    name: str  # as the user named it
    weights_bytes: int
    kv_bytes_per_token: int


class EstimateResult(Result):
    """What the formula says of all draft lengths."""

    kind: Literal["estimate"] = "estimate"
    source: str  # where the costs come from
    # P(token i kept | the ones before it kept); the last one holds for all after it
    acceptance: list[float]
    costs: StepCosts  # in seconds, or in plain passes
    lengths: list[LengthEstimate]  # k = 0, 1, ...
    best: int  # the length with the highest speedup; 0: do not speculate
    by_alpha: dict[float, list[float]]  # alpha, equal at all positions -> speedups of k = 0, 1, ...
    memory: list[ModelSize]
