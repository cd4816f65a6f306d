"""Numbers at every output position: how likely its token was to either model, how sure they were, how far they disagreed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from outrider.lab.explain.causes import Drafting, Ledger, account
from outrider.lab.explain.distributions import Distributions, FinishedText
from outrider.lab.recording import Step

NUMBERS = (
    "p_token", "q_token", "p_draft", "q_draft", "p_entropy", "q_entropy", "tv", "outside", "rank_draft", "rank_token",
)  # fmt: skip
NONE = -1  # where there is no token


@dataclass(frozen=True)
class Positions:
    """Columns over the output positions of one text. NaN and -1 where there is no number or token.

    Distributions are those in force for sampled rows; greedy rows show temperature 1 without filters.
    """

    token: np.ndarray  # (n,) int
    draft: np.ndarray  # (n,) int: the draft token tested there; of several siblings, the kept one or the first
    siblings: np.ndarray  # (n,) int: draft tokens that stood there
    p_best: np.ndarray  # (n,) int: favourites
    q_best: np.ndarray
    guess: np.ndarray  # (n,) int: what a deterministic draft says
    p_token: np.ndarray  # (n,) float: probabilities of the text's token
    q_token: np.ndarray
    p_draft: np.ndarray  # of the tested draft token
    q_draft: np.ndarray
    p_entropy: np.ndarray  # nats
    q_entropy: np.ndarray
    tv: np.ndarray  # 1 - sum min(p, q)
    outside: np.ndarray  # mass of p on tokens that the draft can never say
    rank_draft: np.ndarray  # of the tested draft token in p, 1 = likeliest
    rank_token: np.ndarray  # of the text's token in q

    def __len__(self) -> int:
        return len(self.token)

    @property
    def has_draft_probs(self) -> bool:
        """Whether the draft's distribution is known anywhere."""
        return bool(np.isfinite(self.q_entropy).any())


@dataclass(frozen=True)
class Annotated:
    """One text with everything that is known about it."""

    text: FinishedText
    steps: Sequence[Step]
    positions: Positions
    ledger: Ledger


def annotate(text: FinishedText, steps: Sequence[Step], distributions: Iterable[Distributions], drafting: Drafting) -> Annotated:
    """`distributions`: of every output position, in order; only those of one step are held at a time."""
    total = len(text.output)
    ledger, rows = Ledger.empty(total), _Rows(total)
    stream = iter(distributions)
    for number, step in enumerate(steps):
        here = list(islice(stream, step.taken))
        own = replace(drafting, seed=drafting.seed + number)
        ledger.add(step, account(step, here, total - step.start, own))
        tested = tested_tokens(step)
        for level, point in enumerate(here):
            rows.add(step.start + level, point, tested[level] if level < len(tested) else [])
    return Annotated(text, steps, rows.done(), ledger)


def tested_tokens(step: Step) -> list[list[int]]:
    """At every token that the step took: the draft tokens that stood there, the kept one first."""
    parents = step.parents if step.parents is not None else range(-1, len(step.tokens) - 1)
    found = []
    for level, node in enumerate([-1, *step.path][: step.taken]):
        there = [child for child, parent in enumerate(parents) if parent == node]
        kept = step.path[level] if level < len(step.path) else None
        found.append([step.tokens[child] for child in sorted(there, key=lambda child: child != kept)])
    return found


class _Rows:
    """Positions, one at a time."""

    def __init__(self, size: int) -> None:
        self._ints = {name: np.full(size, NONE) for name in ("token", "draft", "siblings", "p_best", "q_best", "guess")}
        self._numbers = {name: np.full(size, np.nan) for name in NUMBERS}

    def add(self, index: int, point: Distributions, tested: list[int]) -> None:
        ints, numbers = self._ints, self._numbers
        ints["token"][index], ints["siblings"][index], ints["p_best"][index] = point.token, len(tested), point.p_best
        p, q = point.p_soft, point.q
        numbers["p_token"][index], numbers["p_entropy"][index] = p[point.token], entropy(p)
        if tested:
            ints["draft"][index] = tested[0]
            numbers["p_draft"][index], numbers["rank_draft"][index] = p[tested[0]], rank(p, tested[0])
        if q is None:
            return
        assert point.q_best is not None
        ints["q_best"][index], ints["guess"][index] = point.q_best, NONE if point.guess is None else point.guess
        numbers["q_token"][index], numbers["q_entropy"][index] = q[point.token], entropy(q)
        numbers["rank_token"][index], numbers["tv"][index] = rank(q, point.token), 1 - np.minimum(p, q).sum()
        numbers["outside"][index] = 0.0 if point.outside is None else p[point.outside].sum()
        if tested:
            numbers["q_draft"][index] = q[tested[0]]

    def done(self) -> Positions:
        return Positions(**self._ints, **self._numbers)


def entropy(point: np.ndarray) -> float:
    """In nats."""
    mass = point[point > 0]
    return float(-(mass * np.log(mass)).sum())


def rank(point: np.ndarray, token: int) -> int:
    """1 for the likeliest; equals share the better rank."""
    return 1 + int((point > point[token]).sum())
