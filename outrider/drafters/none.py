"""No drafter: every step is one token, plain decoding through the very same loop. The baseline of
every comparison."""

from __future__ import annotations

from outrider.drafters.base import Drafter
from outrider.rows import Rows
from outrider.types import Draft


class NoDrafter(Drafter):
    """Proposes nothing."""

    def drafts_for(self, index: int) -> bool:
        return False

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        return Draft.empty(len(rows), rows.device)
