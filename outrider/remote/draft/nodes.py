"""Drafts as nodes of messages: tokens, parents, and the distribution that each drawn token came from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.remote.protocol import messages
from outrider.rows import Rows
from outrider.types import Draft


@dataclass(frozen=True)
class TokenDistribution:
    """A distribution over few tokens, fp32, sum 1."""

    tokens: list[int]
    probs: list[float]


@dataclass(frozen=True)
class DraftNode:
    """One guessed token of a row's tree."""

    parent: int  # number of a node before it; -1: the last committed token
    token: int
    distribution: TokenDistribution | None = None  # what it was drawn from; None: placed

    def message(self) -> messages.Node:
        """The node as a message."""
        node = messages.Node(parent=self.parent, token=self.token, drawn=self.distribution is not None)
        if self.distribution is not None:
            node.distribution.tokens.extend(self.distribution.tokens)
            node.distribution.probs.extend(self.distribution.probs)
        return node


def drafted_nodes(draft: Draft, rows: Rows) -> list[list[DraftNode]]:
    """A drafter's proposal as nodes, row by row. Greedy rows have no distributions, nor have tokens that were placed."""
    tokens, lengths = draft.lists
    drawn = draft.is_sampled().tolist() if draft.probs is not None else []
    found = []
    for index, row in enumerate(rows):
        parents, by_output = draft.parent_lists[index], {}
        if draft.probs is not None and not row.params.is_greedy:
            outputs = [parents[node] + 1 for node in range(lengths[index]) if drawn[index][node]]
            by_output = dict(zip(outputs, distributions_of(draft.probs[index, outputs]), strict=True)) if outputs else {}
        found.append([
            DraftNode(
                parents[node], tokens[index][node], by_output.get(parents[node] + 1) if by_output and drawn[index][node] else None
            )
            for node in range(lengths[index])
        ])  # fmt: skip
    return found


def distributions_of(probs: Tensor) -> list[TokenDistribution]:
    """Distributions (M, V) as the tokens that have mass."""
    rows, tokens = probs.nonzero(as_tuple=True)
    masses = probs[rows, tokens].tolist()
    distributions = [TokenDistribution([], []) for _ in range(len(probs))]
    for row, token, mass in zip(rows.tolist(), tokens.tolist(), masses, strict=True):
        distributions[row].tokens.append(token)
        distributions[row].probs.append(mass)
    return distributions
