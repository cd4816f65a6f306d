"""Drafting with the target's own weights, some of them left out or rounded, on the target's own
keys and values.

The committed prefix is already there, for every layer the draft runs and better than the draft
would have written it: nothing is fed but the pending token, no prompt is read, no memory taken.
What a draft writes for its tokens lies after the target's length (`kv/view.py`), where the
target's pass over them writes again before it reads. Drafting itself is that of any draft model.

Self-speculative decoding: Draft & Verify (Zhang et al. 2309.08168), LayerSkip (Elhoushi et al.
2404.16710), QuantSpec (Tiwari et al. 2502.10424).
"""

from __future__ import annotations

from typing import Any

from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.requirements import Requirements
from outrider.kv.view import KVView
from outrider.models.derived.derive import derived_lm
from outrider.models.lm import LM
from outrider.rows import Rows
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.derived import native_derived_lm
from outrider.runtime.drafting import ChainLoop
from outrider.runtime.run import NativeRun
from outrider.types import Draft, TargetOutput, Verdict


class SelfDrafter(ModelDrafter):
    """Chains from a model derived from the target (`own_lm`)."""

    requires = Requirements(module=True)
    reads_texts = False  # the target has

    def __init__(self, lm: LM, target: LM) -> None:
        """`lm`: as `own_lm` made it, its cache about to be replaced."""
        lm.kv = self._view = KVView(target.kv)
        super().__init__(
            lm,
            ChainLoop(lm, lm.run, target.shape.vocab_size)
            if isinstance(lm.run, NativeRun)
            else None,
        )

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self._view.follow()

    def _catch_up(self, rows: Rows) -> list[list[int]]:
        """The target has just caught up, so only the pending token is missing."""
        self._view.follow()
        return super()._catch_up(rows)


def own_lm(module: Any, target: LM, name: str, notes: list[str]) -> LM:
    """An `LM` around a module derived from the target's, on the native runtime where the target is;
    a note says why it is not."""
    if isinstance(target.run, NativeRun):
        try:
            return native_derived_lm(module, target, name)
        except NotLoweredError as error:
            notes.append(f"{name} runs without the native runtime: {error}")
    return derived_lm(module, target, name)
