"""Counted tokens against the distributions they should have been drawn from: G-tests over many
distributions at once, and what they can see (docs/certify.md, "Power").

Two views of the same draws, each with its cells:

* **tokens**: a group is one beginning of the text, cells are the tokens that followed it. Where too few would be expected for two
  cells (a beginning drawn too rarely, or a distribution with one likely token) the draw goes by its
  *rank*.
* **preference**: the ranks of all draws, tokens in the order in which the draft prefers them to the target (q / p).

A token's rank in its own distribution is the probability of the tokens before it, plus a random
share of its own: uniform on [0, 1) when the distribution is right, whichever distribution it was.
So draws from many distributions make one group of cells. G is chi-squared with cells minus groups
degrees of freedom, given how often each beginning was drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize, stats

MIN_EXPECTED = 5.0  # per cell; below it G is no longer chi-squared
PREFERENCE_CELLS = 10


@dataclass
class PositionTable:
    """Cells of the tests of one position."""

    groups: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # observed, expected
    num_draws: int = 0
    impossible: int = 0  # tokens of probability 0
    _quantiles: list[float] = field(default_factory=list)  # of draws without a group
    # of all draws, in the order of the draft's preference
    _preferred: list[float] = field(default_factory=list)

    def add(
        self,
        probs: np.ndarray,
        drawn: Sequence[int],
        rng: np.random.Generator,
        draft: np.ndarray | None = None,
    ) -> None:
        """Tokens `drawn` from `probs` (V,) fp64, which sums to 1; `draft` (V,) fp64, the drafter's
        own distribution there."""
        tokens = np.asarray(drawn)
        self.num_draws += len(tokens)
        self.impossible += int((probs[tokens] <= 0).sum())
        observed, expected = cells(probs, tokens)
        if len(observed) > 1:
            self.groups.append((observed, expected))
        elif probs.max() < 1:
            self._quantiles += quantiles(probs, tokens, rng, probs)
        if draft is not None and probs.max() < 1:
            ratio = np.divide(draft, probs, where=probs > 0, out=np.zeros_like(probs))
            self._preferred += quantiles(probs, tokens, rng, ratio)

    def tokens(self, tolerated: float = 0.0) -> GStatistic:
        """The test of single tokens. `tolerated`: share of impossible tokens that does not end the
        matter."""
        groups = [*self.groups, *_uniform(self._quantiles, _halving(len(self._quantiles)))]
        return statistic(groups, self.num_draws, self.impossible, tolerated)

    def preference(self) -> GStatistic | None:
        """The test in the draft's order; None where no draft distribution was given."""
        if not self._preferred:
            return None
        num_cells = min(PREFERENCE_CELLS, int(len(self._preferred) / MIN_EXPECTED))
        groups = _uniform(self._preferred, np.linspace(0, 1, num_cells + 1))
        return statistic(groups, self.num_draws, self.impossible, tolerated=1.0)


@dataclass(frozen=True)
class GStatistic:
    """One finished G-test."""

    num_draws: int
    # of those, from distributions that leave a choice: all others can only be right or impossible
    num_uncertain: int
    num_cells: int
    g: float
    df: int
    p_value: float
    impossible: int


def statistic(
    groups: Sequence[tuple[np.ndarray, np.ndarray]],
    num_draws: int,
    impossible: int,
    tolerated: float = 0.0,
) -> GStatistic:
    """The test of (observed, expected) groups of cells. `tolerated`: share of impossible tokens
    that does not end the matter."""
    num_cells = sum(len(observed) for observed, _ in groups)
    g = float(sum(_corrected(*group) for group in groups))
    df = num_cells - len(groups)
    num_uncertain = int(sum(observed.sum() for observed, _ in groups))
    p_value = float(stats.chi2.sf(g, df)) if df else 1.0
    if impossible > tolerated * num_draws:
        p_value = 0.0
    return GStatistic(num_draws, num_uncertain, num_cells, g, df, p_value, impossible)


def cells(probs: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(observed, expected) of one group, likeliest tokens first."""
    if len(tokens) < 2 * MIN_EXPECTED:  # never two cells
        return np.array([len(tokens)]), np.array([float(len(tokens))])
    order = np.argsort(-probs, kind="stable")
    expected = probs[order] * len(tokens)
    observed = np.bincount(tokens, minlength=len(probs))[order]
    alone = int((expected >= MIN_EXPECTED).sum())
    ends = [*range(1, alone + 1), *_ends_of_rare(expected[alone:], alone)]
    # too little is left for a cell
    if not ends or expected[ends[-1] :].sum() > 0 or observed[ends[-1] :].any():
        ends = [*ends[:-1], len(probs)]
    starts = [0, *ends[:-1]]
    return np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)


def _ends_of_rare(expected: np.ndarray, offset: int) -> list[int]:
    """The ends of cells of rare tokens; what is left over belongs to none."""
    ends = []
    total = 0.0
    for index, value in enumerate(expected.tolist()):
        total += value
        if total >= MIN_EXPECTED:
            ends.append(offset + index + 1)
            total = 0.0
    return ends


def quantiles(
    probs: np.ndarray, tokens: np.ndarray, rng: np.random.Generator, score: np.ndarray
) -> list[float]:
    """Positions of tokens in their distribution, ordered by falling `score` (V,): uniform numbers
    in [0, 1)."""
    before = {token: probs[_ahead(score, token)].sum() for token in set(tokens.tolist())}
    starts = np.array([before[token] for token in tokens.tolist()])
    return np.clip(starts + rng.random(len(tokens)) * probs[tokens], 0, np.nextafter(1, 0)).tolist()


def _ahead(score: np.ndarray, token: int) -> np.ndarray:
    """(V,) bool: the tokens of higher score, among equals those of lower id. No sorting: mostly few
    tokens are asked for."""
    ahead = score > score[token]
    ahead[:token] |= score[:token] == score[token]
    return ahead


def _uniform(found: list[float], edges: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Quantiles as one group of the cells between `edges`; none where they are too few for two."""
    if len(edges) < 3:
        return []
    return [(np.histogram(found, bins=edges)[0], np.diff(edges) * len(found))]


def _halving(num: int) -> np.ndarray:
    """0, 1/2, 3/4, ... 1: cells halve towards 1, where the unlikely tokens are, while they are
    expected often enough."""
    num_cuts = int(np.log2(max(1.0, num / MIN_EXPECTED)))
    return np.array([*(1 - 0.5**cut for cut in range(num_cuts + 1)), 1.0])


def _corrected(observed: np.ndarray, expected: np.ndarray) -> float:
    """G of one group over Williams' factor (1976): cells expected few times make G a little too
    large."""
    num = observed.sum()
    num_cells = len(observed)
    expected = expected * (num / expected.sum())  # the same total to the last bit, as scipy asks
    factor = 1 + (num * (1 / expected).sum() - 1) / (6 * num * (num_cells - 1))
    return stats.power_divergence(observed, expected, lambda_="log-likelihood").statistic / factor


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses Holm's step-down procedure rejects, the chance of any false rejection being
    at most `level`."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def detectable(found: GStatistic, level: float, power: float) -> float | None:
    """The smallest total variation, on average over the draws, that this test at `level` finds with
    probability `power`.

    Where distributions leave no choice one wrong token is enough. None: nothing was drawn.
    """
    if found.num_draws == 0:
        return None
    if found.df == 0:
        return float(1 - (1 - power) ** (1 / found.num_draws))
    among_uncertain = float(
        np.sqrt(noncentrality(found.df, level, power) / (4 * found.num_uncertain))
    )
    return min(1.0, among_uncertain) * found.num_uncertain / found.num_draws


def noncentrality(df: int, level: float, power: float) -> float:
    """The noncentrality of G at which a test at `level` rejects with probability `power`."""
    threshold = stats.chi2.isf(level, df)
    top = 1.0
    while stats.ncx2.sf(threshold, df, top) < power:
        top *= 2
    return float(optimize.brentq(lambda x: stats.ncx2.sf(threshold, df, x) - power, 0, top))


def normalised(rows: Iterable[np.ndarray]) -> list[np.ndarray]:
    """fp64, normalised: what fp32 distributions lack to 1 must not look like a bias."""
    return [row.astype(np.float64) / row.sum(dtype=np.float64) for row in rows]
