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
    acceptance: list[float]  # P(token i kept | the ones before it kept); the last one holds for all after it
    costs: StepCosts  # in seconds, or in plain passes
    lengths: list[LengthEstimate]  # k = 0, 1, ...
    best: int  # the length with the highest speedup; 0: do not speculate
    by_alpha: dict[float, list[float]]  # alpha, equal at all positions -> speedups of k = 0, 1, ...
    memory: list[ModelSize]


class RemoteLength(Record):
    """Drafts from a service, at one draft length."""

    num_draft_tokens: int
    tau: float
    target_s: float  # a step without drafting
    reply_s: float  # round trip and drafting
    speedup: float  # every step waits for its draft
    co_located_speedup: float  # with the draft in the target's process


class RemoteEstimate(Record):
    """What a draft service would bring (outrider/lab/estimate/remote.py)."""

    rtt_s: float
    lengths: list[RemoteLength]  # gamma = 1, 2, ...
    best_num_draft_tokens: int
    speedup: float  # there
    pays: bool
    in_time: bool  # a reply takes no longer than a plain step: the drafter waits for it
    co_located_speedup: float  # at its own best length
