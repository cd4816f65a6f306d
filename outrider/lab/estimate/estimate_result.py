"""The result of `outrider estimate`."""

from __future__ import annotations

from typing import Literal

from outrider.lab.predict import SpeedPrediction, StepCosts
from outrider.lab.result import Record, Result


class LengthEstimate(SpeedPrediction):
    """The speedup of one draft length, and its requirements."""

    break_even_alpha: float | None  # equal at all positions; None: no alpha pays


class ModelSize(Record):
    """The memory that one model takes."""

    role: Literal["target", "draft"]
    name: str  # as the user named it
    weights_bytes: int
    kv_bytes_per_token: int


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
