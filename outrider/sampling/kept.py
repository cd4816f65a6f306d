"""How likely a node's children are to be kept: what rules of acceptance come to, over the children's draws and the coins.

A path reaches a node with weight a (1 where every node is judged by itself; below 1 where whole paths are judged, as block and
traversal verification do). Given that the node is kept, a child is kept with probability

    (1 - E[product over siblings of (1 - their coins)]) / a                the residual rule of tree.py, traversal.py

For one drawn child that is sum_v min(p(v), q(v)/a). Placed children carry p of their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Probs = np.ndarray  # (V,) float64, sum 1
DRAWS = 16  # simulated sibling sets where an expectation has no closed form; each conditional on rejection, so few suffice
RACES = 128  # noise vectors, where a tree's children are winners of a race with the target's own noise


@dataclass(frozen=True)
class Children:
    """Tokens below one node, in the order in which they are tried."""

    tokens: Sequence[int]
    drawn: Sequence[bool]  # from the draft's distribution (True) or placed
    replacement: bool = False  # drawn siblings may repeat

    @classmethod
    def one(cls, *, drawn: bool, token: int = -1) -> Children:
        return cls((token,), (drawn,))

    @property
    def num_drawn(self) -> int:
        return sum(self.drawn)

    @property
    def placed(self) -> list[int]:
        return sorted({token for token, drawn in zip(self.tokens, self.drawn, strict=True) if not drawn})


def kept_share(p: Probs, q: Probs | None, children: Children, weight: float, seed: int) -> float:
    """P(a child is kept | the node is), over the draws of the children and the coins: the residual rule.

    Exact for at most one draw without replacement, and for any number with; else over `DRAWS` simulated sibling sets.
    """
    simulated = children.num_drawn > 1 and not children.replacement
    walk = _SiblingWalk(p, q, weight, DRAWS if simulated else 1, np.random.default_rng(seed))
    turns = list(zip(children.tokens, children.drawn, strict=True))
    for rank, (token, drawn) in enumerate(turns):
        if drawn:
            walk.draw(replacement=children.replacement, last=not any(more for _, more in turns[rank + 1 :]))
        else:
            walk.place(token, replacement=children.replacement)
    return min(1.0, max(0.0, (1 - float(walk.fails.mean())) / weight))


class _SiblingWalk:
    """Siblings rejected one after another, M times at once: `tree.Residuals`, with tokens drawn from what is rejected."""

    def __init__(self, p: Probs, q: Probs | None, weight: float, count: int, rng: np.random.Generator) -> None:
        self.wanted = np.repeat((p * weight)[None], count, 0)  # (M, V) a p
        self.mass = np.full(count, weight)  # (M,) a
        self.probs = None if q is None else np.repeat(q[None], count, 0)  # (M, V)
        self.fails = np.ones(count)  # (M,) P(all so far are rejected)
        self._rng = rng

    def place(self, token: int, *, replacement: bool) -> None:
        coin = np.minimum(self.wanted[:, token], 1)
        self.fails *= 1 - coin
        rest = self.wanted.copy()
        rest[:, token] = 0
        self._reject(rest)
        if self.probs is not None and not replacement:
            self._remove(np.full(len(coin), token))

    def draw(self, *, replacement: bool, last: bool) -> None:
        assert self.probs is not None, "a drawn child without the distribution it was drawn from"
        coin = np.minimum(self.probs, self.wanted).sum(1)
        self.fails *= np.clip(1 - coin, 0, 1)
        refused = np.clip(self.probs - self.wanted, 0, None)
        self._reject(np.clip(self.wanted - self.probs, 0, None))
        if not (last or replacement):
            self._remove(_one_of_each(refused, self._rng))

    def _reject(self, rest: np.ndarray) -> None:
        total = rest.sum(1)
        scale = total + (1 - self.mass)
        possible = scale > 0  # else the child is kept with certainty, and what follows does not matter
        safe = np.where(possible, scale, 1)
        self.wanted = np.where(possible[:, None], rest / safe[:, None], self.wanted)
        self.mass = np.where(possible, total / safe, self.mass)

    def _remove(self, tokens: np.ndarray) -> None:
        assert self.probs is not None
        self.probs[np.arange(len(tokens)), tokens] = 0
        total = self.probs.sum(1, keepdims=True)
        self.probs = np.where(total > 0, self.probs / np.where(total > 0, total, 1), 0)


def child_weight(p: Probs, q: Probs | None, children: Children, weight: float, kept: int) -> float:
    """The weight with which the child at rank `kept` is entered, its earlier siblings rejected: min(1, a p/q)."""
    walk = _SiblingWalk(p, q, weight, 1, np.random.default_rng(0))
    for token, drawn in list(zip(children.tokens, children.drawn, strict=True))[:kept]:
        before = walk.probs
        if drawn:
            walk.draw(replacement=children.replacement, last=True)
            if before is not None and not children.replacement:
                walk._remove(np.array([token]))
        else:
            walk.place(token, replacement=children.replacement)
    token = children.tokens[kept]
    if not children.drawn[kept]:
        return float(min(1.0, walk.wanted[0, token]))
    assert walk.probs is not None
    return float(min(1.0, walk.wanted[0, token] / max(walk.probs[0, token], np.finfo(float).tiny)))


def race_share(p: Probs, q: Probs, count: int, seed: int) -> float:
    """P(the target's choice is among the draft's `count` best), both racing with the same Gumbel noise.

    One child: sum_v 1 / sum_u max(p_u/p_v, q_u/q_v) (weighted coincidence of exponential races); more: `RACES` simulations.
    """
    if count == 1:
        return float(race_agreement(p, q).sum())
    noise = np.random.default_rng(seed).gumbel(size=(RACES, len(p)))
    with np.errstate(divide="ignore"):
        choice = (np.log(p) + noise).argmax(1)
        scores = np.log(q) + noise
    better = (scores > scores[np.arange(RACES), choice][:, None]).sum(1)
    return float(((better < count) & (q[choice] > 0)).mean())


def race_agreement(p: Probs, q: Probs) -> np.ndarray:
    """(V,) P(both races are won by v)."""
    both = np.flatnonzero((p > 0) & (q > 0))
    found = np.zeros_like(p)
    if not len(both):
        return found
    with np.errstate(divide="ignore"):
        ratio = np.where(q > 0, p / np.where(q > 0, q, 1), np.inf)
    alive = np.flatnonzero((p > 0) | (q > 0))
    alive = alive[np.argsort(ratio[alive], kind="stable")]
    below_q = np.concatenate([[0.0], np.cumsum(q[alive])])  # mass of q at smaller ratios
    above_p = np.concatenate([np.cumsum(p[alive][::-1])[::-1], [0.0]])
    rank = np.searchsorted(ratio[alive], ratio[both], side="left")
    found[both] = 1 / (above_p[rank] / p[both] + below_q[rank] / q[both])
    return found


def _one_of_each(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One token per row (M,) from weights (M, V); any token where there is no weight."""
    cumulative = np.cumsum(weights, 1)
    threshold = rng.random(len(weights)) * cumulative[:, -1]
    return (cumulative > threshold[:, None]).argmax(1)
