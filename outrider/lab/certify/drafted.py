"""The distributions that a drafter reports, against the tokens that it drew from them.

A verifier takes `Draft.probs` at its word. Where the drafter draws from another distribution,
emitted tokens show it late: a report of q^0.9 in place of q, by a tenth of what drafted tokens
show.

A token's rank in its distribution is uniform on [0, 1), as in `gtest.py`. Ranks are counted in
cells, tokens in two orders: the likeliest first (another temperature, another filter; cells halve
towards 1, where unlikely tokens are), and by id (a faulty way to draw).
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

HALVING = [0, 0.25, *(1 - 0.5**cut for cut in range(1, 17)), 1]
EDGES: Mapping[View, np.ndarray] = {
    "likeliest first": np.array(HALVING),
    "by id": np.linspace(0, 1, 11),
}
ORDERS = tuple(EDGES)
MAX_NUMBERS = 1 << 22  # of one batch of distributions


class DraftedRanks:
    """How many drawn draft tokens fell into each cell of their distributions; an observer of steps."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._impossible = 0  # tokens whose reported probability is 0
        self._counts: dict[View, np.ndarray] = {
            order: np.zeros(len(edges) - 1, dtype=np.int64) for order, edges in EDGES.items()
        }

    def observe(self, facts: StepFacts) -> None:
        """A step is over."""
        for probs, tokens in _drawn(facts.draft):
            for order, before, share in _shares(probs, tokens):
                ranks = before + self._rng.random(len(before)) * share
                self._counts[order] += np.histogram(np.clip(ranks, 0, 1), bins=EDGES[order])[0]
            self._impossible += int((probs.gather(1, tokens[:, None]) <= 0).sum())

    def as_json(self) -> dict[str, Any]:
        """The counts, for a journal."""
        lists: dict[str, Any] = {"impossible": self._impossible}
        for order, counts in self._counts.items():
            lists[order] = counts.tolist()
        return lists

    def add(self, counts: Mapping[str, Any]) -> None:
        """Adds what `as_json` gave of another run."""
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


def _drawn(draft: Draft) -> Iterator[tuple[Tensor, Tensor]]:
    """Drawn tokens (n,) and their distributions (n, V), not normalised, some at a time."""
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
    """Their tokens."""
    siblings = draft.children[row][draft.parent_lists[row][node] + 1]
    return [draft.lists[0][row][sibling] for sibling in siblings[: siblings.index(node)]]


def _shares(probs: Tensor, tokens: Tensor) -> Iterator[tuple[View, np.ndarray, np.ndarray]]:
    """For each order, the probability (n,) of all tokens before the drawn one, and its own."""
    drawn = probs.gather(1, tokens[:, None])
    total = probs.sum(dim=1, dtype=torch.float64)
    share = (drawn[:, 0].double() / total).cpu().numpy()
    lower = torch.arange(probs.shape[1], device=probs.device) < tokens[:, None]
    likelier = (probs > drawn) | ((probs == drawn) & lower)
    for order, ahead in zip(ORDERS, (likelier, lower), strict=True):
        before = torch.where(ahead, probs, 0).sum(dim=1, dtype=torch.float64) / total
        yield order, before.cpu().numpy(), share
