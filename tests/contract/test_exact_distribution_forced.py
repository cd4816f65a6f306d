"""Tokens that a grammar forces may be added to any draft: every verifier still emits exactly the
target's joint distribution.

The real `with_forced` grows every proposal that a drafter can make. What it is told to force here
is a rule of the path, whatever the target thinks of it: often wrong, so also rejected.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.drafters.forced import with_forced
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.verifiers import VERIFIERS
from tests import oracle
from tests.contract.test_exact_distribution import DRAFTS, EXACT, FILTERS, pair, verifier_named
from tests.contract.test_exact_distribution_trees import SHAPES, TREE_VERIFIERS
from tests.oracle_trees import shape, tree_drafts

LOSSLESS = [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless]


class Rule:
    """Forces tokens after some paths and none after others; always where two tokens were drafted."""

    def __init__(self, turn: int) -> None:
        self._turn = turn

    def allowed(self, paths: list[list[int]]) -> torch.Tensor:
        """Whether the drafter's own token is kept where another one is forced."""
        turns = [len(path) + sum(path) + self._turn for path in paths]
        return torch.tensor([[(turn + token) % 2 == 0 for token in range(3)] for turn in turns])

    def forced(self, path: list[int], most: int) -> list[int]:
        if len(path) == 2:
            return [sum(path) % 3]
        return [[], [1, 2], [2], [0, 0, 1]][(len(path) + 2 * sum(path) + self._turn) % 4]


def worst_bias(
    verifier: str, target: oracle.TableModel, proposals: oracle.Proposals, max_nodes: int
) -> float:
    """The largest bias under the rules that force something in these proposals."""
    biases = []
    drafter = NgramDrafter.__new__(NgramDrafter)
    for turn in range(4):
        row = SimpleNamespace(constraint=Rule(turn), clamp_draft=lambda size: size)
        rows = cast(Any, [row] * len(proposals.weights))
        grown = with_forced(proposals.draft, drafter, rows, max_nodes)
        if not grown.has_forced:
            continue
        tokens, lengths = grown.draft.lists
        paths = [tuple(line[:length]) for line, length in zip(tokens, lengths, strict=True)]
        forced = replace(proposals, draft=grown.draft, paths=paths)
        biases.append(oracle.bias(verifier_named(verifier), target, forced))
    return max(biases)


@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("filters", ["plain", "everything", "greedy"])
def test_chains(verifier: str, drafts: str, filters: str) -> None:
    """Catches drawn tokens that are withheld, and forced ones taken for drawn ones."""
    target, drafter = pair(11, 3, 4, FILTERS[filters], FILTERS[filters])
    proposals = DRAFTS[drafts](drafter, 2)
    assert worst_bias(verifier, target, proposals, 3) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("verifier", TREE_VERIFIERS)
@pytest.mark.parametrize("name", SHAPES)
def test_trees(verifier: str, name: str) -> None:
    target, drafter = pair(11, 3, 4, FILTERS["plain"], FILTERS["plain"])
    proposals = tree_drafts(drafter, shape(*SHAPES[name]))
    assert worst_bias(verifier, target, proposals, len(SHAPES[name][0]) + 2) < EXACT


@pytest.mark.parametrize("verifier", TREE_VERIFIERS)
def test_siblings_drawn_with_replacement(verifier: str) -> None:
    target, drafter = pair(3, 3, 4, FILTERS["plain"], FILTERS["top_k"])
    proposals = tree_drafts(drafter, shape([-1, -1, 0, 1], "ssss"), replacement=True)
    assert worst_bias(verifier, target, proposals, 6) < EXACT
