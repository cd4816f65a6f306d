"""The distributions that a drafter reports, against the tokens that it drew from them: drafting is cheap, so little is missed.

A verifier takes `Draft.probs` at its word. Where the drafter draws from another distribution, acceptance and residual are both
wrong, by so little that emitted tokens show it late: of q^0.9 in place of q, by a tenth of what drafted tokens show.

A token's rank in the distribution that it was drawn from is uniform on [0, 1), as in `gtest.py`, whichever distribution it was.
Ranks are counted in cells, tokens in two orders: the likeliest first (another temperature, another filter), and by id (a
faulty way to draw). In the first order cells halve towards 1: another temperature moves unlikely tokens most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.lab.certify.certify_result import View
from outrider.lab.certify.gtest import MIN_EXPECTED, GStatistic, statistic
from outrider.step import StepFacts
from outrider.types import Draft

EDGES: Mapping[View, np.ndarray] = {
    "likeliest first": np.array([0, 0.25, *(1 - 0.5**cut for cut in range(1, 17)), 1]), "by id": np.linspace(0, 1, 11),
}  # fmt: skip
ORDERS = tuple(EDGES)
MAX_NUMBERS = 1 << 22  # of one batch of distributions


class DraftedRanks:
    """An observer of steps: how many drawn draft tokens fell into each cell of their distributions."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._counts: dict[View, np.ndarray] = {order: np.zeros(len(EDGES[order]) - 1, dtype=np.int64) for order in ORDERS}
        self._impossible = 0

    def observe(self, facts: StepFacts) -> None:
        for probs, tokens in _drawn(facts.draft):
            for order, before, share in _shares(probs, tokens):
                ranks = before + self._rng.random(len(before)) * share
                self._counts[order] += np.histogram(np.clip(ranks, 0, 1), bins=EDGES[order])[0]
            self._impossible += int((probs.gather(1, tokens[:, None]) <= 0).sum())

    def as_json(self) -> dict[str, Any]:
        """Counts by order, and of tokens whose reported probability is 0."""
        return {**{order: counts.tolist() for order, counts in self._counts.items()}, "impossible": self._impossible}


class DraftedTable:
    """The counts of many runs, and their tests."""

    def __init__(self) -> None:
        self._counts: dict[View, np.ndarray] = {order: np.zeros(len(EDGES[order]) - 1, dtype=np.int64) for order in ORDERS}
        self._impossible = 0

    def add(self, counts: Mapping[str, Any]) -> None:
        """What `DraftedRanks.as_json` gave."""
        for order in ORDERS:
            self._counts[order] += counts[order]
        self._impossible += counts["impossible"]

    def tests(self) -> Iterator[tuple[View, GStatistic]]:
        """One for each order; none where too little was drawn for two cells."""
        for order, counts in self._counts.items():
            total = int(counts.sum())
            observed, expected = merged(counts, np.diff(EDGES[order]) * total)
            if len(observed) > 1:
                yield order, statistic([(observed, expected)], total, self._impossible)


def merged(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring cells added up, from the first on, until each is expected often enough; what is left joins the last one."""
    starts, total = [0], 0.0
    for index, value in enumerate(expected.tolist()):
        if total >= MIN_EXPECTED and expected[index:].sum() >= MIN_EXPECTED:
            starts.append(index)
            total = 0.0
        total += value
    return np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)


def _drawn(draft: Draft) -> Iterator[tuple[Tensor, Tensor]]:
    """Drawn tokens (n,) and the distributions (n, V) that they were drawn from, not normalised, some at a time."""
    if draft.probs is None:
        return
    valid = torch.arange(draft.num_nodes, device=draft.tokens.device) < draft.lengths[:, None]
    rows, nodes = torch.nonzero(draft.is_sampled() & valid, as_tuple=True)
    tokens, parents = draft.tokens[rows, nodes], draft.parent_nodes()[rows, nodes]
    size = max(1, MAX_NUMBERS // draft.probs.shape[2])
    for part in torch.arange(len(rows), device=rows.device).split(size):
        probs = draft.probs[rows[part], parents[part] + 1]
        if draft.parents is not None and not draft.replacement:
            for index, (row, node) in enumerate(zip(rows[part].tolist(), nodes[part].tolist(), strict=True)):
                probs[index, _earlier_siblings(draft, row, node)] = 0
        yield probs, tokens[part]


def _earlier_siblings(draft: Draft, row: int, node: int) -> list[int]:
    """Their tokens."""
    siblings = draft.children[row][draft.parent_lists[row][node] + 1]
    return [draft.lists[0][row][sibling] for sibling in siblings[: siblings.index(node)]]


def _shares(probs: Tensor, tokens: Tensor) -> Iterator[tuple[View, np.ndarray, np.ndarray]]:
    """For each order, the probability (n,) of all tokens before the drawn one, and its own."""
    own, ids = probs.gather(1, tokens[:, None]), torch.arange(probs.shape[1], device=probs.device)
    total = probs.sum(dim=1, dtype=torch.float64)
    share = (own[:, 0].double() / total).cpu().numpy()
    lower = ids < tokens[:, None]
    for order, ahead in zip(ORDERS, ((probs > own) | ((probs == own) & lower), lower), strict=True):
        before = torch.where(ahead, probs, 0).sum(dim=1, dtype=torch.float64) / total
        yield order, before.cpu().numpy(), share
