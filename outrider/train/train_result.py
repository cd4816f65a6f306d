"""The result of a training run: its learning curve, and the drafter's figures on held-out prompts,
before and after."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.lab.result import Record, Result


class CurvePoint(Record):
    """One validation on the held-out texts."""

    epoch: float
    step: int
    loss: float
    tau: float  # expected: 1 + sum of `survival`
    survival: list[float]  # [j]: chance that the first j + 1 draft tokens are all accepted
    parts: dict[str, float]  # further means by name


class TrainingLoss(Record):
    step: int
    loss: float  # mean since the entry before


class HeldOutResult(Record):
    """The drafter at work, on held-out prompts of one task at one temperature."""

    label: str  # "before" (untrained, or --init) or "after"
    configuration: str  # in the text form of configuration.py, the drafter's folder left out
    temperature: float
    task: str
    num_prompts: int
    steps: int  # target passes
    emitted: int  # tokens
    drafted: int
    accepted: int
    tested: int
    accepted_per_position: list[int]  # [j]: steps whose draft token j + 1 was accepted

    @property
    def tau(self) -> float:
        """emitted / steps."""
        return self.emitted / max(self.steps, 1)

    @property
    def alpha(self) -> float:
        """accepted / tested."""
        return self.accepted / max(self.tested, 1)


class TrainResult(Result):
    kind: Literal["train"] = "train"
    target: str
    recipe: str  # the kind of drafter
    config: dict[str, Any]  # TrainConfig, resolved
    settings: dict[str, Any]  # the kind's own
    responses: dict[str, Any]  # where the texts come from
    num_train: int  # texts
    num_held_out: int
    num_train_tokens: int  # of responses
    num_trained_parameters: int
    drafter_bytes: int  # on disk
    steps: int
    seconds: float  # of training steps
    best_step: int
    curve: list[CurvePoint]
    losses: list[TrainingLoss]
    calibration: dict[str, float] = Field(default_factory=dict)
    measured: list[HeldOutResult] = Field(default_factory=list)


EXPORT_FILE = "export.json"


class ExportResult(Result):
    """The export of one drafter."""

    kind: Literal["export"] = "export"
    drafter: str  # its kind
    layout: str
    source: str
    target: str
    checks: list[str]  # what --check found, one line each; empty without it
