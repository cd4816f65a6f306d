"""Rows of one batch under different verifiers: each emits exactly its target's joint distribution,
with any neighbours.

Every proposal stands in the batch once under each rule; the real `verdict_by_rule` groups, slices
and merges, and all outcomes of all rows are enumerated at once. The distribution of the rows of
each rule must be the target's own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.sampling.rng import Purpose
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier
from outrider.verifiers.batch import verdict_by_rule
from tests import oracle
from tests.contract.test_exact_distribution import EXACT, FILTERS, pair
from tests.oracle_trees import probs_on, shape, tree_drafts


class SomeRows:
    """A Randomness that plays a step's enumeration for some of its rows; the others' weights are
    shared out meanwhile."""

    def __init__(
        self, whole: oracle.Enumeration, races: Tensor, plan: list[Tensor], members: list[int]
    ) -> None:
        self._whole = whole
        self._races = races
        self._plan = plan
        self._members = members

    def select(self, members: list[int]) -> SomeRows:
        return SomeRows(self._whole, self._races, self._plan, members)

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        return self._play("bernoulli", 2 ** probs.shape[1], probs, purpose, start)

    def categorical(
        self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]
    ) -> Tensor:
        return self._play("categorical", weights.shape[1], weights, purpose, start, offset)

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        return self._play(
            "gumbel",
            vocab_size ** positions.shape[1],
            positions,
            vocab_size,
            width=positions.shape[1],
        )

    def _play(self, what: str, num_outcomes: int, *arguments: object, width: int = 0) -> Tensor:
        plan = [self._plan.pop(0)[self._members]] if self._plan else []
        mine = oracle.Enumeration(
            self._whole.weights[self._members], plan, self._races[self._members, :width]
        )
        outcome = getattr(mine, what)(*arguments)
        self._whole.weights /= num_outcomes
        self._whole.weights[self._members] = mine.weights
        return outcome


def enumerate_mixed(
    rules: list[Verifier], proposals: oracle.Proposals, probs: Tensor
) -> oracle.Outcomes:
    """`oracle.enumerate_step` with one rule per proposal."""
    proposal = torch.arange(len(proposals.weights))
    plan = list[Tensor]()
    while True:
        whole = oracle.Enumeration(
            torch.tensor(proposals.weights, dtype=torch.float64)[proposal], [], probs[proposal]
        )
        rng = SomeRows(whole, probs[proposal], list(plan), list(range(len(proposal))))
        draft = oracle.select_rows(proposals.draft, proposal)
        try:
            chosen = [rules[index] for index in proposal.tolist()]
            verdict = verdict_by_rule(chosen, draft, probs[proposal], rng, [7] * len(proposal))  # type: ignore[arg-type]
            return oracle.Outcomes(proposal, whole.weights, verdict)
        except oracle.NeedsOutcomesError as need:
            num_rows = len(proposal)
            num_outcomes = len(need.outcomes)
            proposal = proposal.repeat_interleave(num_outcomes)
            plan = [outcome.repeat_interleave(num_outcomes, dim=0) for outcome in plan]
            plan.append(need.outcomes.repeat(num_rows, 1))


def doubled(proposals: oracle.Proposals) -> oracle.Proposals:
    """Everything twice, the second time for the second rule."""
    twice = torch.arange(len(proposals.weights)).repeat(2)
    draft = oracle.select_rows(proposals.draft, twice)
    return replace(
        proposals, paths=proposals.paths * 2, weights=[*proposals.weights] * 2, draft=draft
    )


def worst_bias(
    names: tuple[str, str],
    target: oracle.TableModel,
    proposals: oracle.Proposals,
    probs: Tensor,
    horizon: int,
) -> float:
    """The larger of the two rules' distances from the target's distribution."""
    num = len(proposals.weights)
    both = doubled(proposals)
    rules = [rule for rule in (VERIFIERS.load(name)() for name in names) for _ in range(num)]
    outcomes = enumerate_mixed(rules, both, torch.cat([probs, probs]))
    texts = oracle.emitted_tokens(outcomes, both)
    found: list[oracle.Joint] = [{}, {}]
    for text, origin, weight in zip(
        texts, outcomes.proposal.tolist(), outcomes.weights.tolist(), strict=True
    ):
        emitted = found[origin // num]
        emitted[text] = emitted.get(text, 0.0) + weight
    joint = target.joint(horizon)
    return max(
        oracle.total_variation(oracle.continued(emitted, target, horizon), joint)
        for emitted in found
    )


@pytest.mark.parametrize(
    "names", [("block", "token"), ("block", "gumbel"), ("gumbel", "traversal")]
)
@pytest.mark.parametrize("kinds", ["", "sd"])
def test_chains(names: tuple[str, str], kinds: str) -> None:
    """Catches one rule's verdict, coins or distribution handed to the other's rows."""
    target, drafter = pair(6, 2, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = oracle.sampled_drafts(drafter, 2, kinds=kinds)
    assert worst_bias(names, target, proposals, target.probs_along(proposals.paths, 2), 3) < EXACT


@pytest.mark.parametrize("names", [("traversal", "multi-round"), ("multi-round", "gumbel")])
def test_trees(names: tuple[str, str]) -> None:
    target, drafter = pair(8, 3, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = tree_drafts(drafter, shape([-1, -1], "ss"))
    assert worst_bias(names, target, proposals, probs_on(target, proposals.draft), 2) < EXACT


def test_a_swapped_row_would_be_seen() -> None:
    """The oracle's own test: verdicts merged in another order must not pass."""
    target, drafter = pair(6, 2, 2, FILTERS["plain"], FILTERS["plain"])
    other, _ = pair(7, 2, 2, FILTERS["plain"], FILTERS["plain"])
    proposals = oracle.sampled_drafts(drafter, 2)
    wrong = other.probs_along(proposals.paths, 2)
    assert worst_bias(("block", "token"), target, proposals, wrong, 3) > 0.01
