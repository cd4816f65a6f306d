"""Solutions without models: columns of kept and rejected draft tokens, as the study reads them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from outrider.lab.explain.causes import CAUSES
from outrider.lab.explain.forecast import TextWalk
from outrider.lab.reasoning.kinds import KINDS
from outrider.lab.reasoning.solved import Solved

LETTERS = dict(zip("darc", KINDS, strict=True))
COLUMNS = ("p_token", "p_draft", "q_draft", "rank_token", "p_entropy", "q_entropy", "tv")


def solved(steps: Sequence[tuple[str, str]], **columns: Sequence[float]) -> Solved:
    """Steps of (kept, kinds), a letter a token: k kept, r rejected (the correction stands there), b bonus."""
    fates = "".join(kept for kept, _ in steps)
    kinds = [LETTERS[letter] for _, letters in steps for letter in letters]
    ledger = SimpleNamespace(
        kept=np.array([{"k": 1, "r": 0, "b": -1}[fate] for fate in fates]),
        level=np.array([place for kept, _ in steps for place in range(len(kept))]),
        parts=np.zeros((len(fates), len(CAUSES))),
    )
    given = {name: np.array(columns.get(name, [np.nan] * len(fates)), dtype=float) for name in COLUMNS}
    tokens = {name: np.array(columns.get(name, range(len(fates)))) for name in ("draft", "token")}
    text = SimpleNamespace(annotated=SimpleNamespace(ledger=ledger, positions=SimpleNamespace(**given, **tokens)))
    return Solved(cast(Any, text), kinds)


def guessed(agrees: str, limit: int = 1000) -> TextWalk:
    """A greedy text whose draft is right where there is a 1."""
    column = np.array([float(letter) for letter in agrees])
    return TextWalk("guessed", limit, column, np.ones(len(agrees)), np.ones(len(agrees)), np.ones(len(agrees)))
