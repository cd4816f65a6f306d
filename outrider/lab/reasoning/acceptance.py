"""How far drafts are kept, by kind of step: two questions with two answers.

    alpha, by position     of the tokens of a kind: how often is a draft token kept that is tested there?
    survival               of the steps that begin in a kind: how many draft tokens does one keep, wherever they lead?
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.lab.reasoning.kinds import KINDS
from outrider.lab.reasoning.result import KindAcceptance
from outrider.lab.reasoning.shares import proportion, survival_curve
from outrider.lab.reasoning.solved import Solved

ALL = "all"
FEWEST = 10  # tests of a position from which its share is shown


def by_kind(solved: Sequence[Solved], longest: int) -> list[KindAcceptance]:
    """"all" first, then every kind that occurs."""
    found = [_acceptance(solved, None, longest), *(_acceptance(solved, place, longest) for place in range(len(KINDS)))]
    return [one for one in found if one.tokens]


def _acceptance(solved: Sequence[Solved], kind: int | None, longest: int) -> KindAcceptance:
    here = [_all(one) if kind is None else one.kind == kind for one in solved]
    began = [_all(one) if kind is None else one.start_kind == kind for one in solved]
    kept, tested = counts(solved, here, longest)
    step_kept, step_reached = counts(solved, began, longest)
    positions = zip(kept.sum(0).tolist(), tested.sum(0).tolist(), strict=True)
    overlap = np.concatenate([1 - one.text.annotated.positions.tv[mine] for one, mine in zip(solved, here, strict=True)])
    return KindAcceptance(
        kind=ALL if kind is None else KINDS[kind],
        tokens=int(sum(mine.sum() for mine in here)),
        tested=int(tested.sum()),
        kept=int(kept.sum()),
        alpha=proportion(kept.sum(1).tolist(), tested.sum(1).tolist()),
        overlap=float(np.nanmean(overlap)) if np.isfinite(overlap).any() else None,
        starts=int(step_reached[:, 0].sum()),
        survival=survival_curve(step_kept, step_reached),
        by_position=[above / below if below >= FEWEST else None for above, below in positions],
    )


def counts(solved: Sequence[Solved], here: Sequence[np.ndarray], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """(problems, positions) draft tokens kept, and tested, among the tokens that `here` (n,) chooses of each text."""
    kept, tested = np.zeros((2, len(solved), longest), dtype=int)
    for row, (one, mine) in enumerate(zip(solved, here, strict=True)):
        for total, chosen in ((kept, one.kept == 1), (tested, one.kept >= 0)):
            total[row] = np.bincount(one.level[mine & chosen], minlength=longest)[:longest]
    return kept, tested


def _all(one: Solved) -> np.ndarray:
    return np.ones(len(one.kinds), dtype=bool)
