"""A trained part that takes part in `tune`, as results keep it. `drafts.py` reads its files, with code of models."""

from __future__ import annotations

from typing import Any

from outrider.lab.result import Record


class TrainedHead(Record):
    """One trained part."""

    kind: str  # the drafter that drafts with it; ACCEPTANCE: a rule that ends the draft model's drafts
    folder: str  # as options name it; "": it comes with the target
    max_chain: int | None = None  # tokens of its longest chain; None: any number
    confidence: bool = False  # of a block head: it says when to stop
    markov: bool = False  # of a block head: its guesses depend on the token before

    @property
    def options(self) -> dict[str, Any]:
        """Options of the drafter that drafts with this head."""
        return {"head": self.folder} if self.folder else {}
