"""The joint distribution of emitted tokens under the REAL verifier code, without a single random
number.

Every outcome becomes a row of one big batch: every draft the drafter can propose (weighted with the
distribution it is drawn from), every vector of accept/reject coins and every next token. The
verifier runs once on that batch; in place of random streams it gets an `Enumeration`, which hands
each row its prescribed outcome and multiplies the row's weight by that outcome's probability. What
was emitted is then continued with the target's distribution to the depth of the draft plus one and
added up. A lossless verifier gives the target's own joint distribution, to rounding (total
variation < 1e-12 in fp64).

The Gumbel-coupled verifier uses continuous noise. For it the WINNER of each position's race is prescribed (noise 0 for it,
-inf for all others) with the probability the race gives it: p(v), the Gumbel-max theorem.

Not covered: reuse of random numbers between steps (`intervals.py`) and the keyed generator itself
(tests/unit/sampling/test_rng.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.sampling.rng import Purpose, Randomness
from outrider.types import Draft, Verdict
from tests.enumeration.tables import Joint, Path, Proposals, TableModel, continued, total_variation

Verify = Callable[[Draft, Tensor, Randomness, Tensor], Verdict]  # `Verifier.verify`


class UnsoundError(OutriderError):
    """A verifier did what no sound one does: a coin outside [0, 1], a draw from nothing, a verdict
    that contradicts itself."""


class NeedsOutcomesError(Exception):
    """A draw that the plan does not cover yet: every row has to be split over these outcomes."""

    def __init__(self, outcomes: Tensor) -> None:
        super().__init__("internal to the enumeration")
        self.outcomes = outcomes  # (K, n) int64 or bool


class Enumeration:
    """A Randomness that returns prescribed outcomes and multiplies each row's weight by their
    probability."""

    def __init__(self, weights: Tensor, plan: list[Tensor], race_probs: Tensor) -> None:
        self.weights = weights.clone()  # (B,) fp64
        self._plan = list(plan)
        # (B, N+1, V): who wins a race with Gumbel noise, and how often
        self._race_probs = race_probs

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        num = probs.shape[1]
        vectors = torch.tensor([*itertools.product([False, True], repeat=num)], dtype=torch.bool)
        heads = self._next(vectors.view(-1 if num else 1, num))
        _require(
            bool(((probs >= 0) & (probs <= 1)).all()), "a coin's probability lies outside [0, 1]"
        )
        self.weights *= torch.where(heads, probs, 1 - probs).prod(dim=1)
        return heads

    def categorical(
        self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]
    ) -> Tensor:
        token = self._next(torch.arange(weights.shape[1])[:, None])
        total = weights.sum(dim=1)
        _require(bool((weights >= 0).all()), "a weight is negative")
        _require(bool((total > 0).all()), "there is nothing to draw from")
        self.weights *= weights.gather(1, token)[:, 0] / total
        return token[:, 0]

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        num = positions.shape[1]
        _require(num == self._race_probs.shape[1], "there is not one race per output")
        winners = self._next(torch.tensor(list(itertools.product(range(vocab_size), repeat=num))))
        self.weights *= self._race_probs.gather(-1, winners[..., None])[..., 0].prod(dim=1)
        return torch.where(
            torch.nn.functional.one_hot(winners, vocab_size) > 0, 0.0, -torch.inf
        ).double()

    def _next(self, outcomes: Tensor) -> Tensor:
        if not self._plan:
            raise NeedsOutcomesError(outcomes)
        return self._plan.pop(0)


@dataclass
class Outcomes:
    """Every outcome of one step: which proposal it began with, its probability, what the verifier
    emitted."""

    proposal: Tensor  # (R,) index into Proposals
    weights: Tensor  # (R,) fp64, sum 1
    verdict: Verdict


def enumerate_step(verify: Verify, proposals: Proposals, target_probs: Tensor) -> Outcomes:
    """Run `verify` over all outcomes. It may draw any number of times, in an order that depends on
    shapes only."""
    proposal = torch.arange(len(proposals.weights))
    plan: list[Tensor] = []
    while True:
        weights = torch.tensor(proposals.weights, dtype=torch.float64)[proposal]
        randomness = Enumeration(weights, plan, target_probs[proposal])
        draft = select_rows(proposals.draft, proposal)
        try:
            verdict = verify(
                draft, target_probs[proposal], randomness, torch.full_like(proposal, 7)
            )
            return Outcomes(proposal, randomness.weights, verdict)
        except NeedsOutcomesError as need:
            num_rows = len(proposal)
            num_outcomes = len(need.outcomes)
            proposal = proposal.repeat_interleave(num_outcomes)
            plan = [outcome.repeat_interleave(num_outcomes, dim=0) for outcome in plan]
            plan.append(need.outcomes.repeat(num_rows, 1))


def select_rows(draft: Draft, rows: Tensor) -> Draft:
    """A draft that has only the rows given by their indices."""

    def pick(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[rows]

    return Draft(
        tokens=draft.tokens[rows],
        lengths=draft.lengths[rows],
        parents=pick(draft.parents),
        probs=pick(draft.probs),
        sampled=pick(draft.sampled),
        replacement=draft.replacement,
    )


def emitted_tokens(outcomes: Outcomes, proposals: Proposals) -> list[Path]:
    """The tokens each outcome commits: kept path, then the correction or bonus."""
    tokens = proposals.draft.lists[0]
    lists = outcomes.verdict.lists
    texts = []
    for row, origin in enumerate(outcomes.proposal.tolist()):
        kept = [node for node in lists.path[row] if node >= 0]
        _require(
            len(kept) == lists.num_accepted[row], "path and num_accepted of a verdict disagree"
        )
        texts.append((*(tokens[origin][node] for node in kept), lists.next_token[row]))
    return texts


def step_joint(verify: Verify, target: TableModel, proposals: Proposals) -> Joint:
    """Joint distribution of the next tokens: one step of `verify`, continued with the target's
    distribution to the draft's depth plus one."""
    outcomes = enumerate_step(verify, proposals, target_pass(target, proposals))
    joint: Joint = {}
    for tokens, weight in zip(
        emitted_tokens(outcomes, proposals), outcomes.weights.tolist(), strict=True
    ):
        if weight > 0:
            joint[tokens] = joint.get(tokens, 0.0) + weight
    return continued(joint, target, horizon_of(proposals))


def target_pass(target: TableModel, proposals: Proposals) -> Tensor:
    """(B, N+1, V): the target's pass over all proposals."""
    draft = proposals.draft
    return (
        target.probs_on(draft)
        if draft.parents is not None
        else target.probs_along(proposals.paths, draft.num_nodes)
    )


def horizon_of(proposals: Proposals) -> int:
    """Max tokens that one step can emit."""
    return max(map(max, proposals.draft.levels)) + 1


def bias(verify: Verify, target: TableModel, proposals: Proposals) -> float:
    """TV distance between what the verifier emits and the target's own joint distribution."""
    return total_variation(
        step_joint(verify, target, proposals), target.joint(horizon_of(proposals))
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise UnsoundError(what)
