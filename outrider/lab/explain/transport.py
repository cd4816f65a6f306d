"""How much of a node's distribution its children can carry at best, whatever lossless rule judges them.

Given that a node is kept, which is entered with weight a (`sampling/kept.py`), a child is kept with probability at most

    min over H of [a p(H) + 1 - P(all children lie in H)] / a              optimal transport, max-flow = min-cut

For one drawn child that is sum_v min(p(v), q(v)/a), which rules reach; with several drawn siblings they stay below. Placed
children carry p of their tokens. The minimum is attained on a set of largest q/p, for draws with and without replacement: Hu et
al. 2502.18779, Theorems 3 and 4. `tests/unit/lab/explain/test_transport.py` holds it to brute force.
"""

from __future__ import annotations

import numpy as np

from outrider.sampling.kept import Children, Probs

SETS = 4096  # simulated sibling sets for P(all children lie in H)


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
