"""What a drafter is: four verbs, called by `decode.step`, never by each other.

    start(row)                  a new row joins at the end of the batch
    propose(rows, gamma)        guess up to gamma[b] tokens for each row; may return fewer, or none
    commit(rows, verdict)       the step is over: forget what was rejected, learn from what was said
    stop(index)                 the row at `index` leaves; the last row takes its place

A drafter decides what to propose from the committed text and its own laws, never from the value of the token it would
propose (non-anticipation): that, and honest `Draft.probs`, is all it takes to be lossless with every verifier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from outrider.models.load import LoadedModel
from outrider.rows import Row, Rows
from outrider.types import Draft, Verdict


@dataclass(frozen=True)
class DraftSetup:
    """What a drafter may need when it is built."""

    target: LoadedModel
    draft: LoadedModel | None  # the model given with --draft
    num_draft_tokens: int  # the most it will be asked for


class Drafter(ABC):
    """Base of all drafters; `outrider ls drafters` prints the class attributes."""

    lossless: bool = True
    needs_draft: bool = False  # whether --draft must name a model
    shape: str = "chain"

    @classmethod
    def build(cls, setup: DraftSetup) -> Drafter:
        """Make one for this target. Raises ConfigError or CapabilityError before the first token."""
        return cls()

    def start(self, row: Row) -> None:  # noqa: B027  stateless drafters need nothing
        """A row joins the batch as its last one."""

    @abstractmethod
    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        """A draft with at most gamma[b] nodes for row b."""

    def commit(self, rows: Rows, verdict: Verdict) -> None:  # noqa: B027
        """Called after `rows` took the verdict. Afterwards all state equals a fresh start on the rows' tokens."""

    def stop(self, index: int) -> None:  # noqa: B027
        """The row at `index` leaves by swap-remove."""
