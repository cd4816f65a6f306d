"""How vLLM is set to draft with an exported folder, and what it is known to be unable to do.

    kind           vLLM's method           draft tokens compared
    eagle          eagle                   4
    eagle3         eagle3                  4
    medusa         medusa                  as many as there are heads, at most 4
    draft-model    draft_model             4
    block          dflash, or dspark where it has a Markov or confidence head: all that the head was trained to guess at once,
                   since its masks see one another and fewer of them would be another computation

Read in vLLM 0.32: config/speculative.py, v1/spec_decode, model_executor/models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.models.heads.block import BlockHead
from outrider.models.heads.medusa import MedusaHeads

LENGTH = 4
REASONS = {  # from vLLM's words to ours
    "does not support: dspark": "vLLM runs heads with a Markov or a confidence head (DSpark) only in its Model Runner V2, which "
    "needs Triton, so on a GPU; a plain DFlash head (train with markov_rank=0, confidence=false) runs on CPU, too",
}


@dataclass(frozen=True)
class Method:
    """How one exported folder drafts, there and here."""

    name: str  # vLLM's
    num_draft_tokens: int

    def config(self, folder: Path) -> dict[str, Any]:
        """vLLM's `speculative_config`."""
        return {
            "method": self.name,
            "model": str(folder.resolve()),
            "num_speculative_tokens": self.num_draft_tokens,
        }


def method_of(kind: str, head: object | None) -> Method:
    """How vLLM drafts with `head`, the loaded one; None for a draft model."""
    if isinstance(head, BlockHead):
        is_dspark = bool(head.config.markov_rank) or head.config.confidence
        return Method("dspark" if is_dspark else "dflash", head.config.num_guesses)
    length = min(LENGTH, head.num_heads) if isinstance(head, MedusaHeads) else LENGTH
    return Method(kind.replace("-", "_"), length)


def explained(reason: str) -> str:
    """vLLM's words, with ours behind them where we know more."""
    return next(
        (f"{reason}. That is: {ours}" for theirs, ours in REASONS.items() if theirs in reason),
        reason,
    )
