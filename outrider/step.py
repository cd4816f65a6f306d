"""What a step of decoding is to those who take part in it without drafting or verifying: its facts, and three roles.

    control     chooses how much every row drafts, and learns from the facts
    reader      lets a draft model read texts before it drafts, in pieces; the engine has one
    observer    sees the facts of every step: recorders, reports, timers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from outrider.rows import Rows
from outrider.types import Draft, Verdict


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step that is over; `rows` hold what came of it."""

    rows: Rows
    asked: list[int]  # nodes per row that the drafter was asked for
    draft: Draft
    verdict: Verdict
    seconds: float  # without reading prompts, which is no part of a step's price
    draft_s: float  # in the drafter, reading included

    @property
    def drafted(self) -> list[int]:
        """Nodes per row that were submitted."""
        return self.draft.lists[1]

    @property
    def accepted(self) -> list[int]:
        """Nodes per row that the verifier kept."""
        return self.verdict.lists.num_accepted

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


class DraftReader(Protocol):
    """Reads texts into the draft before drafting."""

    fed: list[int]  # rows that the latest call read some of

    def read(self, rows: Rows, asked: list[int]) -> list[int]:
        """Read some of what is missing of the rows that are asked for nodes; returns `asked`, 0 where more must be read."""
        ...
