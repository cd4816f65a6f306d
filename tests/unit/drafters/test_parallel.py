"""Chains and trees from distributions that are all there at once: honest, and counted out against
the target's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.drafters.parallel import DistributionStop, draft_chain, draft_tree
from outrider.rows import Rows
from outrider.sampling.confidence import ConfidenceSettings, StopRule
from outrider.sampling.params import SamplingParams
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests import oracle
from tests.contract.test_exact_distribution import FILTERS
from tests.unit.drafters.enumerated import all_drafts, batch

V = 3
LEVELS = 2
PROMPT = [0, 2]
EXACT = 1e-6  # the drafts' distributions are fp32
CHAIN_VERIFIERS = ["token", "block"]
TREE_VERIFIERS = ["traversal"]


@dataclass
class Table:
    """One distribution per level, and a correction for the token before: what a block head with a
    Markov head says."""

    base: Tensor  # (levels, V)
    markov: Tensor  # (V, V): [previous]

    @property
    def num_levels(self) -> int:
        return len(self.base)

    def logits(self, level: int, parents: Tensor, origins: Tensor) -> Tensor:
        return self.base[level] + self.markov[parents]


def table(seed: int, *, levels: int = LEVELS, markov: float = 1.0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    return Table(
        torch.randn(levels, V, generator=generator), markov * torch.randn(V, V, generator=generator)
    )


def bias(drafts: oracle.Proposals, verifier: str, params: SamplingParams, seed: int = 3) -> float:
    target = oracle.TableModel.random(
        torch.Generator().manual_seed(seed), V, LEVELS + 1, params, PROMPT
    )
    return oracle.bias(VERIFIERS.load(verifier)().verify, target, drafts)


@pytest.mark.parametrize("verifier", CHAIN_VERIFIERS)
@pytest.mark.parametrize("filters", FILTERS)
def test_chains_keep_the_distribution(verifier: str, filters: str) -> None:
    """Any bias: another distribution than that a token was drawn from, the wrong token before it,
    penalties of another path."""
    guesses = table(1)
    params = FILTERS[filters]
    drafts = all_drafts(
        lambda rows: draft_chain(rows, [LEVELS] * len(rows), guesses), PROMPT, params, V
    )
    assert abs(sum(drafts.weights) - 1) < EXACT
    assert bias(drafts, verifier, params) < EXACT


@pytest.mark.parametrize("stop", ["entropy", "product"])
@pytest.mark.parametrize("verifier", CHAIN_VERIFIERS)
def test_stopping_early_keeps_the_distribution(verifier: str, stop: str) -> None:
    """Catches a rule that looks at the token it decides about; and a rule that never stops would
    test nothing."""
    guesses = table(1)
    params = FILTERS["plain"]
    settings = ConfidenceSettings(stop=stop, stop_below=0.56 if stop == "entropy" else 0.3)

    def drafted(rows: Rows) -> Draft:
        return draft_chain(
            rows,
            [LEVELS] * len(rows),
            guesses,
            DistributionStop(StopRule(settings, len(rows), rows.device)),
        )

    drafts = all_drafts(drafted, PROMPT, params, V)
    assert (
        LEVELS not in drafts.draft.lengths.tolist() or len(set(drafts.draft.lengths.tolist())) > 1
    ), "it never stopped"
    assert bias(drafts, verifier, params) < EXACT


@pytest.mark.parametrize("tree", ["2x1", "3", "sequoia", "best-first", "parallel:2"])
@pytest.mark.parametrize("filters", ["plain", "top_k", "penalties", "everything", "greedy"])
def test_trees_keep_the_distribution(tree: str, filters: str) -> None:
    """Any bias: siblings drawn from the wrong rest, a drawn node that was chosen by its score,
    another branch's penalties."""
    guesses = table(2)
    params = FILTERS[filters]
    plan = TreePlan(TreeSettings(tree=tree))
    drafts = all_drafts(
        lambda rows: draft_tree(rows, [4] * len(rows), guesses, plan)[0], PROMPT, params, V
    )
    assert max(map(max, drafts.draft.levels)) <= LEVELS
    assert bias(drafts, "traversal", params) < EXACT


def test_cold_trees_are_placed() -> None:
    """Catches drawn nodes below `sample_from`, where the likeliest are better, and distributions
    claimed for placed nodes."""
    plan = TreePlan(TreeSettings(tree="best-first", min_gain=0.0))
    rows = batch(PROMPT, SamplingParams(temperature=0.3, max_tokens=9), 2, V)
    draft, _ = draft_tree(rows, [4, 2], table(2, levels=3), plan)
    assert draft.probs is None
    assert draft.lengths.tolist() == [4, 2]


def test_markov_trees_follow_their_own_branch() -> None:
    """Catches a correction for the wrong token: with a deterministic table every branch has one
    right continuation."""
    follow = torch.full((V, V), -50.0)
    follow[torch.arange(V), (torch.arange(V) + 1) % V] = 50.0
    guesses = Table(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), follow)
    guesses.markov[PROMPT[-1]] = 0.0  # the pending token says nothing
    rows = batch(PROMPT, SamplingParams(max_tokens=9), 1, V)
    draft, _ = draft_tree(rows, [6], guesses, TreePlan(TreeSettings(tree="2x1")))
    assert draft.parents[0].tolist() == [-1, -1, 0, 1]
    assert draft.tokens[0].tolist() == [0, 1, 1, 2]
