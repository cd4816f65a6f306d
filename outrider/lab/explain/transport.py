"""How much of a node's distribution its children can carry: what a rule keeps, and what the best possible one would keep.

A path reaches a node with weight a (1 where every node is judged by itself; below 1 where whole paths are judged, as block and
traversal verification do). Given that the node is kept, a child is kept with probability

    kept(rule)   (1 - E[product over siblings of (1 - their coins)]) / a                the residual rule of tree.py, traversal.py
    bound        min over H of [a p(H) + 1 - P(all children lie in H)] / a              optimal transport, max-flow = min-cut

For one drawn child both are sum_v min(p(v), q(v)/a), so nothing is lost; with several drawn siblings the rule stays below the
bound. Placed children carry p of their tokens under both. The minimum is attained on a set of largest q/p, for draws with and
without replacement: Hu et al. 2502.18779, Theorems 3 and 4. `tests/unit/lab/explain/test_transport.py` holds both to brute force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Probs = np.ndarray  # (V,) float64, sum 1
DRAWS = 16  # simulated sibling sets where an expectation has no closed form; each conditional on rejection, so few suffice
SETS = 4096  # the same for P(all children lie in H): draws are cheap, there
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


def bound_share(p: Probs, q: Probs | None, children: Children, weight: float, seed: int) -> float:
    """The largest P(a child is kept | the node is) that any lossless rule can have at this node, entered with this weight.

    Exact for up to two draws without replacement and any number with; beyond, P(all children lie in H) is counted on `SETS`
    simulated sibling sets (one half finds H, the other judges it, so that the minimum is not biased downwards).
    """
    placed = children.placed
    carried = float(p[placed].sum())
    if not children.num_drawn:
        return carried
    assert q is not None, "a drawn child without the distribution it was drawn from"
    probs = _probs_of_draws(q, children)
    count = min(children.num_drawn, int((probs > 0).sum()))
    others = np.ones(len(p), dtype=bool)
    others[placed] = False
    if count <= 1:
        value = weight * carried + (float(np.minimum(probs, weight * p)[others].sum()) if count else 0.0)
        return min(1.0, value / weight)
    order = _by_ratio(probs, p, others)  # the tokens of H beside the placed ones, the most overdrawn first
    cost = weight * (carried + np.concatenate([[0.0], np.cumsum(p[order])])) + 1
    start = float(probs[placed].sum())
    if children.replacement:
        inside = np.minimum(start + np.concatenate([[0.0], np.cumsum(probs[order])]), 1) ** count
        return min(1.0, float((cost - inside).min()) / weight)
    if count == 2:
        return min(1.0, float((cost - _pairs_inside(probs, placed, order)).min()) / weight)
    first, second = _sets_inside(probs, placed, order, count, np.random.default_rng(seed))
    best = int((cost - first).argmin())
    return min(1.0, max(0.0, float(cost[best] - second[best]) / weight))


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


def _probs_of_draws(q: Probs, children: Children) -> Probs:
    """What the first drawn child was drawn from: without the tokens placed before it."""
    if children.replacement:
        return q
    first = list(children.drawn).index(True)
    probs = q.copy()
    probs[list(children.tokens[:first])] = 0
    total = probs.sum()
    return probs / total if total > 0 else probs


def _by_ratio(probs: Probs, p: Probs, others: np.ndarray) -> np.ndarray:
    """Tokens with mass in `probs` among `others`, by falling probability / p."""
    found = np.flatnonzero((probs > 0) & others)
    with np.errstate(divide="ignore"):
        ratio = np.where(p[found] > 0, probs[found] / np.where(p[found] > 0, p[found], 1), np.inf)
    return found[np.argsort(-ratio, kind="stable")]


def _pairs_inside(probs: Probs, placed: list[int], order: np.ndarray) -> np.ndarray:
    """P(two draws without replacement lie in H) for H = placed + the first n of `order`, n = 0, 1, ...:
    sum over i in H of q_i (q(H) - q_i) / (1 - q_i)."""

    def sums(values: np.ndarray) -> np.ndarray:
        return float(values[placed].sum()) + np.concatenate([[0.0], np.cumsum(values[order])])

    rest = 1 - probs
    sure = rest <= 1e-15  # the first draw is certain, and a second one has nothing to draw from
    safe = np.where(sure, 1, rest)
    linear, square = np.where(sure, 0, probs / safe), np.where(sure, 0, probs * probs / safe)
    return np.clip(sums(linear) * sums(probs) - sums(square), 0, 1)


def _sets_inside(
    probs: Probs, placed: list[int], order: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the sets for `count` draws by counting: twice, from independent simulations."""
    rank = np.full(len(probs), len(order) + 1)  # how many of `order` H must have for a token to lie in it
    rank[order] = np.arange(1, len(order) + 1)
    rank[placed] = 0
    tokens = np.flatnonzero(probs)
    ends = np.cumsum(probs[tokens])
    found = np.empty((2 * SETS, count), dtype=np.int64)  # indices in `tokens`
    for draw in range(count):
        found[:, draw] = _next_draws(probs[tokens], ends, found[:, :draw], rng)
    needed = rank[tokens[found]].max(1)
    halves = (np.bincount(half, minlength=len(order) + 2)[: len(order) + 1] for half in (needed[:SETS], needed[SETS:]))
    first, second = (np.cumsum(half) / SETS for half in halves)
    return first, second


def _next_draws(masses: np.ndarray, ends: np.ndarray, taken: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One more draw (M,) from `masses` without those `taken` (M, n): a point on a line that steps over their intervals."""
    taken = np.sort(taken, 1)
    point = rng.random(len(taken)) * (ends[-1] - masses[taken].sum(1))
    for column in taken.T:
        point = np.where(point >= ends[column] - masses[column], point + masses[column], point)
    return np.searchsorted(ends, point, side="right").clip(max=len(ends) - 1)


def _one_of_each(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One token per row (M,) from weights (M, V); any token where there is no weight."""
    cumulative = np.cumsum(weights, 1)
    threshold = rng.random(len(weights)) * cumulative[:, -1]
    return (cumulative > threshold[:, None]).argmax(1)

