"""No drafter: every step is one token, plain decoding through the very same loop. The baseline of every comparison."""

from __future__ import annotations

from outrider.drafters.base import Drafter
from outrider.rows import Rows
from outrider.types import Draft


class NoDrafter(Drafter):
    """Proposes nothing, which it makes once: the first tensor operation behind a pass costs 30 us, whichever it is."""

    _nothing: Draft | None = None

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        if self._nothing is None or self._nothing.num_rows != len(rows):
            self._nothing = Draft.empty(len(rows), rows.device)
        return self._nothing
