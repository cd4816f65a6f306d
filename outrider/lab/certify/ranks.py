"""Drawn tokens against the distributions they should come from: G-tests of their ranks, and what
these can see (docs/certify.md, "Power").

A token's rank in its distribution is the probability of the tokens before it, plus a random share
of its own: uniform on [0, 1) when the distribution is right, whichever distribution it was. So
draws from many distributions are counted in the same cells. The orders are three:

* **likeliest first**: another temperature, another filter; cells halve towards 1, where unlikely tokens are
* **by id**: a faulty way to draw
* **preference**: the tokens first that the draft prefers to the target (q / p), where both are known
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from outrider.lab.certify.certify_result import GStatistic, View
from outrider.step import StepFacts
from outrider.types import Draft

MIN_EXPECTED = 5.0  # per cell; below it G is no longer chi-squared
MAX_NUMBERS = 1 << 22  # of one batch of distributions
EDGES: Mapping[View, np.ndarray] = {
    "likeliest first": np.array([0, 0.25, *(1 - 0.5**cut for cut in range(1, 17)), 1]),
    "by id": np.linspace(0, 1, 11),
    "preference": np.linspace(0, 1, 11),
}


class Ranks:
    """How many drawn tokens fell into each cell of their distributions."""

    def __init__(self, seed: int | Sequence[int] = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.num_draws = 0
        self.impossible = 0
        self._counts: dict[View, np.ndarray] = {}

    def add(self, probs: Tensor, tokens: Tensor, draft: Tensor | None = None) -> None:
        """Tokens (n,) drawn from `probs` (n, V), not normalised; `draft` (n, V): the drafter's own
        distributions there."""
        drawn = probs.gather(1, tokens[:, None])
        self.num_draws += len(tokens)
        self.impossible += int((drawn <= 0).sum())
        has_choice = (probs > 0).sum(dim=1) > 1
        probs = probs[has_choice]
        drawn = drawn[has_choice]
        tokens = tokens[has_choice]
        total = probs.sum(dim=1, dtype=torch.float64)
        share = (drawn[:, 0].double() / total).cpu().numpy()
        lower = torch.arange(probs.shape[1], device=probs.device) < tokens[:, None]
        orders: dict[View, Tensor] = {
            "likeliest first": _ahead(probs, tokens, lower),
            "by id": lower,
        }
        if draft is not None:
            ratio = torch.where(probs > 0, draft[has_choice] / probs, 0)
            orders["preference"] = _ahead(ratio, tokens, lower)
        for order, ahead in orders.items():
            before = torch.where(ahead, probs, 0).sum(dim=1, dtype=torch.float64) / total
            ranks = before.cpu().numpy() + self._rng.random(len(tokens)) * share
            cells = np.histogram(np.clip(ranks, 0, 1), bins=EDGES[order])[0]
            self._counts[order] = self._counts.get(order, 0) + cells

    def observe(self, facts: StepFacts) -> None:
        """A step is over: its drafted tokens, against what the drafter reports."""
        for probs, tokens in _drafted(facts.draft):
            self.add(probs, tokens)

    def as_json(self) -> dict[str, Any]:
        """The counts, for a journal."""
        counts = {order: counts.tolist() for order, counts in self._counts.items()}
        return {"num_draws": self.num_draws, "impossible": self.impossible, "counts": counts}

    def merge(self, other: Mapping[str, Any]) -> None:
        """Adds what `as_json` gave of another run."""
        self.num_draws += other["num_draws"]
        self.impossible += other["impossible"]
        for order, counts in other["counts"].items():
            self._counts[order] = self._counts.get(order, 0) + np.array(counts)

    def tests(self, tolerated: float = 0.0) -> Iterator[tuple[View, GStatistic]]:
        """One for each order; none where nothing was drawn. `tolerated`: share of impossible tokens
        that does not end the matter."""
        orders = self._counts or {"by id": np.zeros(10, dtype=np.int64)}
        for order, counts in orders.items() if self.num_draws else ():
            total = int(counts.sum())
            observed, expected = merged(counts, np.diff(EDGES[order]) * total)
            df = len(observed) - 1
            g = _corrected(observed, expected) if df else 0.0
            p_value = float(stats.chi2.sf(g, df)) if df else 1.0
            if self.impossible > tolerated * self.num_draws:
                p_value = 0.0
            statistic = GStatistic(
                num_draws=self.num_draws,
                num_uncertain=total if df else 0,
                num_cells=len(observed),
                g=g,
                df=df,
                p_value=p_value,
                impossible=self.impossible,
            )
            yield order, statistic


def _ahead(score: Tensor, tokens: Tensor, lower: Tensor) -> Tensor:
    """(n, V) bool: the tokens of higher score, among equals those of lower id."""
    of_token = score.gather(1, tokens[:, None])
    return (score > of_token) | ((score == of_token) & lower)


def _drafted(draft: Draft) -> Iterator[tuple[Tensor, Tensor]]:
    """Distributions (n, V), not normalised, and the tokens (n,) that were drawn from them, some at
    a time."""
    if draft.probs is None:
        return
    valid = torch.arange(draft.num_nodes, device=draft.tokens.device) < draft.lengths[:, None]
    rows, nodes = torch.nonzero(draft.is_sampled() & valid, as_tuple=True)
    tokens = draft.tokens[rows, nodes]
    parents = draft.parent_nodes()[rows, nodes]
    size = max(1, MAX_NUMBERS // draft.probs.shape[2])
    for part in torch.arange(len(rows), device=rows.device).split(size):
        probs = draft.probs[rows[part], parents[part] + 1]
        if draft.parents is not None and not draft.replacement:
            pairs = zip(rows[part].tolist(), nodes[part].tolist(), strict=True)
            for index, (row, node) in enumerate(pairs):
                probs[index, _earlier_siblings(draft, row, node)] = 0
        yield probs, tokens[part]


def _earlier_siblings(draft: Draft, row: int, node: int) -> list[int]:
    siblings = draft.children[row][draft.parent_lists[row][node] + 1]
    return [draft.lists[0][row][sibling] for sibling in siblings[: siblings.index(node)]]


def merged(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring cells added up until each is expected often enough; what is left joins the last
    one."""
    starts = [0]
    total = 0.0
    for index, value in enumerate(expected.tolist()):
        if total >= MIN_EXPECTED and expected[index:].sum() >= MIN_EXPECTED:
            starts.append(index)
            total = 0.0
        total += value
    return np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)


def _corrected(observed: np.ndarray, expected: np.ndarray) -> float:
    """G over Williams' factor (1976): cells expected few times make G a little too large."""
    num = observed.sum()
    expected = expected * (num / expected.sum())  # the same total to the last bit, as scipy asks
    factor = 1 + (num * (1 / expected).sum() - 1) / (6 * num * (len(observed) - 1))
    divergence = stats.power_divergence(observed, expected, lambda_="log-likelihood")
    return float(divergence.statistic / factor)


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses Holm's step-down procedure rejects, the chance of any false rejection being
    at most `level`."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def detectable(statistic: GStatistic, level: float, power: float) -> float | None:
    """The smallest total variation, on average over the draws, that this test at `level` finds with
    probability `power`.

    Where distributions leave no choice one wrong token is enough. None: nothing was drawn.
    """
    if statistic.num_draws == 0:
        return None
    if statistic.df == 0:
        return float(1 - (1 - power) ** (1 / statistic.num_draws))
    least = noncentrality(statistic.df, level, power) / (4 * statistic.num_uncertain)
    return min(1.0, float(np.sqrt(least))) * statistic.num_uncertain / statistic.num_draws


def noncentrality(df: int, level: float, power: float) -> float:
    """The noncentrality of G at which a test at `level` rejects with probability `power`."""
    return float(special.chndtrinc(stats.chi2.isf(level, df), df, 1 - power))
