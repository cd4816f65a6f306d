"""A step of decoding for those who neither draft nor verify in it: its facts, its clock, and three
roles.

    control     chooses how much every row drafts, and learns from the facts
    observer    sees the facts of every step: recorders, reports, timers
    reader      has the target read new prompts otherwise than whole
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from outrider.rows import Rows
from outrider.stats import PartStats, count_parts
from outrider.types import Draft, Verdict

if TYPE_CHECKING:
    from outrider.models.lm import LM


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step that is over; `rows` hold what came of it."""

    rows: Rows
    asked: list[int]  # nodes per row that the drafter was asked for
    draft: Draft
    verdict: Verdict
    # without reading prompts and choosing lengths, which are no part of a step's price
    seconds: float
    draft_s: float  # in the drafter and its control, reading included
    # the pass had forced tokens besides the drafter's, so `seconds` tell its control nothing
    has_forced: bool = False
    # distinct experts that the pass read, the mean of its layers; None: no mixture, or not known
    experts: float | None = None

    def of_drafter(self, draft: Draft, verdict: Verdict) -> StepFacts:
        """For the control, which learns of the drafter's own nodes, without forced tokens."""
        return replace(self, draft=draft, verdict=verdict, has_forced=draft is not self.draft)

    @property
    def drafted(self) -> list[int]:
        """Nodes per row that were submitted."""
        return self.draft.lists[1]

    @property
    def accepted(self) -> list[int]:
        """Nodes per row that the verifier kept."""
        return self.verdict.lists.num_accepted

    def by_part(self, taken: list[int]) -> list[dict[str, PartStats]]:
        """Per row, which took this many tokens, the counts of its draft's parts; none where it has
        no parts."""
        parts = self.draft.parts or [None] * len(taken)
        lists = self.verdict.lists
        rows = zip(parts, lists.path, lists.num_accepted, taken, strict=True)
        return [
            {} if names is None else count_parts(names, path[: min(num_accepted, num_taken)])
            for names, path, num_accepted, num_taken in rows
        ]

    @property
    def rejected(self) -> list[bool]:
        """Per row, whether the verifier turned down what the draft had next."""
        return [not complete for complete in self.verdict.lists.all_accepted]


class StepObserver(Protocol):
    """Sees every step."""

    def observe(self, facts: StepFacts) -> None: ...


class Control(StepObserver, Protocol):
    """Decides how many draft tokens each row gets in a step."""

    def choose(self, rows: Rows) -> list[int]: ...

    def summary(self) -> dict[str, Any]: ...


class PromptReader(Protocol):
    """Reads new prompts into the target's cache before a step, where it does not leave them whole."""

    def read(self, lm: LM, rows: Rows) -> None: ...


class Clock:
    """Wall-clock seconds of one step by phase: `with clock("draft"): ...`.

    CUDA is waited for at the end of each phase, where a step reads results anyway; the step's
    queue, not the device: that would break a CUDA graph which another model's thread is recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self.seconds: dict[str, float] = {}
        # without reading prompts and choosing lengths, which are no part of a step's price
        self.priced = 0.0

    def __call__(self, phase: str, *, priced: bool = True) -> Self:
        self._phase = phase
        self._is_priced = priced
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        seconds = time.perf_counter() - self._began
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + seconds
        self.priced += self._is_priced * seconds

    @property
    def of_step(self) -> tuple[float, float]:
        """Seconds of the step as `StepFacts` has them: priced ones, and those of its drafts."""
        return self.priced, self.seconds["draft"]

    def share(self, rows: Rows, experts: float | None) -> None:
        """Every row waited for the whole step, so each is charged an equal share: sums over rows
        stay wall time. All read the same `experts`."""
        for row in rows:
            row.stats.experts += experts or 0.0
            for phase, seconds in self.seconds.items():
                row.stats.time_s[phase] += seconds / len(rows)
