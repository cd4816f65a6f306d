"""Drafting with the target's own weights, some of them left out or rounded, on the target's own keys and values.

The committed prefix is already there, for every layer the draft runs and better than the draft would have written it: nothing
is fed but the pending token, no prompt is read, no memory taken. What a draft writes for its tokens lies behind the target's
length (`kv/view.py`), where the target's pass over them writes again before it reads. Drafting itself is that of any draft model.

Self-speculative decoding: Draft & Verify (Zhang et al. 2309.08168), LayerSkip (Elhoushi et al. 2404.16710), QuantSpec (Tiwari et
al. 2502.10424).
"""

from __future__ import annotations

from outrider.drafters.base import DraftSetup
from outrider.drafters.draft_model import ModelDrafter
from outrider.drafters.programs import ProgramLoop
from outrider.kv.view import KVView
from outrider.models.derive import derived_loop
from outrider.models.lm import LM
from outrider.rows import Rows
from outrider.types import Draft, TargetOutput, Verdict


class SelfDrafter(ModelDrafter):
    """Chains from a model derived from the target."""

    needs_draft = False
    needs_module = True
    reads_texts = False  # the target has

    def __init__(self, lm: LM, setup: DraftSetup, purpose: str) -> None:
        """`lm`: as `derived_lm` made it, its cache about to be replaced; `purpose`: see `derived_loop`."""
        lm.kv = self._view = KVView(setup.target.lm.kv)
        loop = derived_loop(lm, setup.target, setup.workshop, purpose)
        super().__init__(lm, None if loop is None else ProgramLoop(loop))

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self._view.follow()

    def _catch_up(self, rows: Rows) -> list[list[int]]:
        """The target has just caught up, so only the pending token is missing."""
        self._view.follow()
        return super()._catch_up(rows)
