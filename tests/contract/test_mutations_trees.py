"""Known bugs of tree drafting and tree verification, injected: the oracle must see every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.sampling import traversal, tree
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests import oracle
from tests.oracle_trees import probs_on, shape, tree_bias, tree_drafts

PLAIN = SamplingParams(temperature=1.0)
SEEDS = range(4)
FORK = [-1, -1, 0, 0, 1]
LOSSLESS = ("traversal", "multi-round")


def pair(seed: int) -> list[oracle.TableModel]:
    generator = torch.Generator().manual_seed(seed)
    return [oracle.TableModel.random(generator, 3, 3, PLAIN, [0]) for _ in range(2)]


def worst_bias(name: str, propose: Callable[[oracle.TableModel], oracle.Proposals]) -> float:
    biases = []
    for seed in SEEDS:
        target, drafter = pair(seed)
        biases.append(tree_bias(VERIFIERS.load(name)().verify, target, propose(drafter)))
    return max(biases)


# ------------------------------------------------ bugs of the drafting side


def not_renormalised(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: siblings drawn without replacement, verified as if each had been drawn from the whole
    distribution."""
    proposals = tree_drafts(drafter, shape(FORK, "sssss"))
    return replace(proposals, draft=replace(proposals.draft, replacement=True))


def repeats_called_distinct(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: siblings drawn with replacement, verified as if without."""
    proposals = tree_drafts(drafter, shape(FORK, "sssss"), replacement=True)
    return replace(proposals, draft=replace(proposals.draft, replacement=False))


def sorted_by_score(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: sampled siblings re-sorted by q before they are verified."""
    proposals = tree_drafts(drafter, shape([-1, -1], "ss"))
    score = drafter.probs(())[proposals.draft.tokens]
    order = score.argsort(dim=1, descending=True)
    return replace(
        proposals, draft=replace(proposals.draft, tokens=proposals.draft.tokens.gather(1, order))
    )


def pruned_by_score(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: of two sampled siblings only the likelier is submitted: pruning sampled nodes by their
    own scores."""
    proposals = tree_drafts(drafter, shape([-1, -1], "ss"))
    score = drafter.probs(())[proposals.draft.tokens]
    best = proposals.draft.tokens.gather(1, score.argmax(dim=1, keepdim=True))
    parents = torch.full_like(best, -1)
    draft = Draft(best, torch.ones(len(best), dtype=torch.int64), parents)
    draft.probs = probs_on(drafter, draft)
    return replace(proposals, draft=draft)


def likeliest_called_sampled(drafter: oracle.TableModel) -> oracle.Proposals:
    """BUG: the top tokens placed deterministically, reported as drawn."""
    proposals = tree_drafts(drafter, shape(FORK, "ddddd"))
    return replace(
        proposals, draft=replace(proposals.draft, probs=probs_on(drafter, proposals.draft))
    )


@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize(
    ("propose", "floor"),
    [
        pytest.param(not_renormalised, 0.01, marks=pytest.mark.slow),
        pytest.param(repeats_called_distinct, 0.01, marks=pytest.mark.slow),
        (sorted_by_score, 0.05),
        (pruned_by_score, 0.05),
        (likeliest_called_sampled, 0.1),
    ],
)
def test_drafting_bug_is_seen(
    verifier: str, propose: Callable[[oracle.TableModel], oracle.Proposals], floor: float
) -> None:
    assert worst_bias(verifier, propose) > floor


# ------------------------------------------------ bugs of the verifying side


class ForgetsTheMass(tree.Residuals):
    """BUG: a rejected child leaves its parent's path weight as it was."""

    def reject(self, rows: Tensor, node: Tensor) -> None:
        before = self.mass.clone()
        super().reject(rows, node)
        self.mass = before


class ForgetsTheSibling(tree.Residuals):
    """BUG: the residual after a rejection is not taken: the next sibling is tried against the
    distribution itself."""

    def reject(self, rows: Tensor, node: Tensor) -> None:
        before = self.weights.clone()
        super().reject(rows, node)
        self.weights = before


class CertainSiblings(tree.Residuals):
    """BUG: q = 1 for every child (EAGLE's rule for deterministic children, applied to drawn ones)."""

    def ratio(self, rows: Tensor, node: Tensor) -> Tensor:
        probs = self._laws
        self._laws = None
        try:
            return super().ratio(rows, node)
        finally:
            self._laws = probs


@pytest.mark.parametrize(
    ("verifier", "broken", "floor"),
    [
        pytest.param("traversal", ForgetsTheMass, 0.01, marks=pytest.mark.slow),
        pytest.param("traversal", ForgetsTheSibling, 0.02, marks=pytest.mark.slow),
        pytest.param("traversal", CertainSiblings, 0.05, marks=pytest.mark.slow),
        ("multi-round", ForgetsTheSibling, 0.02),
        ("multi-round", CertainSiblings, 0.05),
    ],
)
def test_verifying_bug_is_seen(
    monkeypatch: pytest.MonkeyPatch, verifier: str, broken: type[tree.Residuals], floor: float
) -> None:
    monkeypatch.setattr(tree, "Residuals", broken)
    monkeypatch.setattr(traversal, "Residuals", broken)
    assert worst_bias(verifier, lambda drafter: tree_drafts(drafter, shape(FORK, "sssss"))) > floor


@pytest.mark.parametrize("verifier", ["typical", "top-k"])
def test_lossy_rules_are_what_they_are_called(verifier: str) -> None:
    """Lossy rules change the distribution visibly. An oracle that missed them would miss
    everything."""
    assert worst_bias(verifier, lambda drafter: tree_drafts(drafter, shape(FORK, "sssss"))) > 0.05
