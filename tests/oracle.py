"""The exact-law oracle: the joint law of emitted tokens under the REAL verifier code, without a single
random number.

How. Every outcome becomes a row of one big batch: every draft the drafter can propose (weighted with the
law it is drawn from), every vector of accept/reject coins and every next token. The verifier runs once on
that batch; in place of random streams it gets an `Enumeration`, which hands each row its prescribed outcome
and multiplies the row's weight by that outcome's probability. What was emitted is then continued with the
target's law to a horizon of gamma + 1 tokens and added up. A lossless verifier gives the target's own joint
law, to rounding (TV < 1e-12 in fp64); the smallest bias of section 2 of the shared algorithms page is 0.01,
so nothing in between is left to argue about.

The Gumbel-coupled verifier uses continuous noise. For it the WINNER of each position's race is prescribed
(noise 0 for it, -inf for all others) with the probability the race gives it: p(v), the Gumbel-max theorem,
itself checked by integration in tests/unit/sampling/test_coupling.py. Independence of the drafter is
checked separately, for every table of a discrete noise.

Not covered: the keyed generator itself (tests/unit/sampling/test_rng.py) and reuse of its numbers between
steps, which `interval_law` covers by tracking the interval each uniform is known to lie in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.sampling.distribution import BatchSampling, History, distribution
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import Purpose
from outrider.types import Draft, Verdict

Path = tuple[int, ...]
Law = dict[Path, float]


# ------------------------------------------------ models: a law for every text


@dataclass
class TableModel:
    """A language model as a table: logits for every text up to a depth, then a law through the real
    `distribution`.
    """

    logits: dict[Path, Tensor]  # output so far -> (V,) fp64
    params: SamplingParams
    prompt: list[int]
    known: dict[Path, Tensor] = field(default_factory=dict)  # laws computed so far

    @classmethod
    def random(
        cls,
        generator: torch.Generator,
        vocab_size: int,
        depth: int,
        params: SamplingParams,
        prompt: list[int],
    ) -> TableModel:
        """Independent normal logits (scale 1.5) for every output of fewer than `depth` tokens."""
        paths = [path for n in range(depth) for path in itertools.product(range(vocab_size), repeat=n)]
        scale = 1.5
        table = scale * torch.randn(len(paths), vocab_size, generator=generator, dtype=torch.float64)
        return cls(dict(zip(paths, table, strict=True)), params, prompt)

    @property
    def vocab_size(self) -> int:
        return self.logits[()].shape[0]

    def law(self, path: Path) -> Tensor:
        """(V,) the plain law after `path`: its history is committed text, no draft is involved."""
        if path not in self.known:
            history = History.start([self.prompt], [list(path)], self.vocab_size)
            sampling = BatchSampling.of([self.params], self.vocab_size)
            law = distribution(self.logits[path][None, None], sampling, history, dtype=torch.float64)
            self.known[path] = law[0, 0]
        return self.known[path]

    def laws_along(self, drafts: list[Path], width: int) -> Tensor:
        """(B, width + 1, V): one pass over padded drafts, penalties applied per draft path by
        `distribution` itself.
        """
        rows = [[self.logits[draft[:n]] for n in range(len(draft) + 1)] for draft in drafts]
        nan = torch.full(
            (self.vocab_size,), torch.nan, dtype=torch.float64
        )  # padding must never be looked at
        logits = torch.stack([torch.stack(row + [nan] * (width + 1 - len(row))) for row in rows])
        draft = chain(drafts, width)
        history = History.start([self.prompt] * len(drafts), [[]] * len(drafts), self.vocab_size)
        sampling = BatchSampling.of([self.params] * len(drafts), self.vocab_size)
        return distribution(logits, sampling, history, draft, dtype=torch.float64)

    def joint(self, horizon: int) -> Law:
        """The target's own joint law over the next `horizon` tokens."""
        law: Law = {(): 1.0}
        for _ in range(horizon):
            law = {
                (*path, token): weight * prob
                for path, weight in law.items()
                if weight > 0
                for token, prob in enumerate(self.law(path).tolist())
            }
        return law


def chain(drafts: list[Path], width: int) -> Draft:
    """A batch of chains, padded with token 0."""
    tokens = torch.tensor([list(draft) + [0] * (width - len(draft)) for draft in drafts], dtype=torch.int64)
    return Draft(tokens.view(len(drafts), width), torch.tensor([len(draft) for draft in drafts]))


# ------------------------------------------------ drafters: every proposal with its probability


@dataclass
class Proposals:
    """All drafts a drafter can make, with their probabilities."""

    paths: list[Path]
    weights: list[float]
    draft: Draft  # B = len(paths)


Stop = Callable[[Path], bool]  # draft so far -> stop drafting? may look at the draft and at q


def never(_: Path) -> bool:
    return False


def sampled_drafts(drafter: TableModel, gamma: int, stop: Stop = never, kinds: str = "") -> Proposals:
    """Drafts drawn from the drafter's law, up to `gamma` tokens or until `stop`.

    `kinds` may make single nodes deterministic: "sds" = sampled, argmax, sampled.
    """
    kinds = kinds or "s" * gamma
    proposals: list[tuple[Path, float]] = []
    growing: list[tuple[Path, float]] = [((), 1.0)]
    while growing:
        path, weight = growing.pop()
        if len(path) == gamma or stop(path):
            proposals.append((path, weight))
            continue
        law = drafter.law(path)
        law = law if kinds[len(path)] == "s" else torch.nn.functional.one_hot(law.argmax(), len(law))
        growing += [((*path, token), weight * prob) for token, prob in enumerate(law.tolist()) if prob > 0]
    paths = [path for path, _ in proposals]
    draft = chain(paths, gamma)
    draft.probs = drafter.laws_along(paths, gamma)
    if "d" in kinds:
        draft.sampled = torch.tensor([[kind == "s" for kind in kinds]] * len(paths))
    return Proposals(paths, [weight for _, weight in proposals], draft)


def fixed_drafts(paths: list[Path], width: int) -> Proposals:
    """Deterministic drafts; several of them are several rows of a batch with equal weight (lengths may
    differ).
    """
    return Proposals(paths, [1 / len(paths)] * len(paths), chain(paths, width))


def greedy_draft(drafter: TableModel, gamma: int) -> Proposals:
    """The drafter's argmax path as a deterministic draft."""
    path: Path = ()
    for _ in range(gamma):
        path = (*path, int(drafter.law(path).argmax()))
    return fixed_drafts([path], gamma)


# ------------------------------------------------ the enumeration in place of randomness


class NeedsOutcomesError(Exception):
    """A draw that the plan does not cover yet: every row has to be split over these outcomes."""

    def __init__(self, outcomes: Tensor) -> None:
        super().__init__("internal to the oracle")
        self.outcomes = outcomes  # (K, n) int64 or bool


class Enumeration:
    """A Randomness that returns prescribed outcomes and multiplies each row's weight by their probability."""

    def __init__(self, weights: Tensor, plan: list[Tensor], race_laws: Tensor) -> None:
        self.weights = weights.clone()  # (B,) fp64
        self._plan = list(plan)
        self._race_laws = race_laws  # (B, N+1, V): who wins a race with Gumbel noise, and how often

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        num = probs.shape[1]
        heads = self._next(
            torch.tensor([*itertools.product([False, True], repeat=num)], dtype=torch.bool).view(
                -1 if num else 1, num
            )
        )
        assert bool(((probs >= 0) & (probs <= 1)).all()), "a coin's probability lies outside [0, 1]"
        self.weights *= torch.where(heads, probs, 1 - probs).prod(dim=1)
        return heads

    def categorical(self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]) -> Tensor:
        token = self._next(torch.arange(weights.shape[1])[:, None])
        total = weights.sum(dim=1)
        assert bool((weights >= 0).all()), "a weight is negative"
        assert bool((total > 0).all()), "there is nothing to draw from"
        self.weights *= weights.gather(1, token)[:, 0] / total
        return token[:, 0]

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        num = positions.shape[1]
        assert num == self._race_laws.shape[1], "one race per output"
        winners = self._next(torch.tensor(list(itertools.product(range(vocab_size), repeat=num))))
        self.weights *= self._race_laws.gather(-1, winners[..., None])[..., 0].prod(dim=1)
        return torch.where(torch.nn.functional.one_hot(winners, vocab_size) > 0, 0.0, -torch.inf).double()

    def _next(self, outcomes: Tensor) -> Tensor:
        if not self._plan:
            raise NeedsOutcomesError(outcomes)
        return self._plan.pop(0)


@dataclass
class Outcomes:
    """Every outcome of one step: which proposal it began with, its probability, what the verifier said."""

    proposal: Tensor  # (R,) index into Proposals
    weights: Tensor  # (R,) fp64, sum 1
    verdict: Verdict


Verify = Callable[[Draft, Tensor, object, Tensor], Verdict]


def enumerate_step(verify: Verify, proposals: Proposals, target_probs: Tensor) -> Outcomes:
    """Run `verify` over all outcomes. It may draw any number of times, in an order that depends on shapes
    only.
    """
    proposal = torch.arange(len(proposals.paths))
    plan: list[Tensor] = []
    while True:
        weights = torch.tensor(proposals.weights, dtype=torch.float64)[proposal]
        randomness = Enumeration(weights, plan, target_probs[proposal])
        draft = select_rows(proposals.draft, proposal)
        try:
            verdict = verify(draft, target_probs[proposal], randomness, torch.full_like(proposal, 7))
            return Outcomes(proposal, randomness.weights, verdict)
        except NeedsOutcomesError as need:
            num_rows, num_outcomes = len(proposal), len(need.outcomes)
            proposal = proposal.repeat_interleave(num_outcomes)
            plan = [outcome.repeat_interleave(num_outcomes, dim=0) for outcome in plan]
            plan.append(need.outcomes.repeat(num_rows, 1))


def select_rows(draft: Draft, rows: Tensor) -> Draft:
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


# ------------------------------------------------ laws and distances


def emitted_tokens(outcomes: Outcomes, proposals: Proposals) -> list[Path]:
    """The tokens each outcome commits: kept path, then the correction or bonus."""
    verdict = outcomes.verdict
    texts = []
    for row, origin in enumerate(outcomes.proposal.tolist()):
        kept = [node for node in verdict.path[row].tolist() if node >= 0]
        assert len(kept) == int(verdict.num_accepted[row]), "path and num_accepted disagree"
        tokens = [int(proposals.draft.tokens[origin, node]) for node in kept]
        texts.append((*tokens, int(verdict.next_token[row])))
    return texts


def step_law(verify: Verify, target: TableModel, proposals: Proposals) -> Law:
    """Joint law of the next N + 1 tokens: one step of `verify`, continued with the target's law to that
    horizon.
    """
    width = proposals.draft.num_nodes
    outcomes = enumerate_step(verify, proposals, target.laws_along(proposals.paths, width))
    law: Law = {}
    for tokens, weight in zip(emitted_tokens(outcomes, proposals), outcomes.weights.tolist(), strict=True):
        if weight > 0:
            law[tokens] = law.get(tokens, 0.0) + weight
    return continued(law, target, width + 1)


def continued(law: Law, target: TableModel, horizon: int) -> Law:
    """Extend every shorter text with the target's law."""
    done: Law = {}
    growing = list(law.items())
    while growing:
        path, weight = growing.pop()
        if len(path) == horizon:
            done[path] = done.get(path, 0.0) + weight
        else:
            probs = target.law(path).tolist()
            growing += [((*path, token), weight * prob) for token, prob in enumerate(probs) if prob > 0]
    return done


def total_variation(left: Law, right: Law) -> float:
    return 0.5 * sum(abs(left.get(path, 0.0) - right.get(path, 0.0)) for path in left.keys() | right.keys())


def bias(verify: Verify, target: TableModel, proposals: Proposals) -> float:
    """TV distance between what the verifier emits and the target's own joint law."""
    return total_variation(step_law(verify, target, proposals), target.joint(proposals.draft.num_nodes + 1))


def expected_accepted(verify: Verify, target: TableModel, proposals: Proposals) -> float:
    """Mean number of kept draft tokens of one step."""
    outcomes = enumerate_step(
        verify, proposals, target.laws_along(proposals.paths, proposals.draft.num_nodes)
    )
    return float((outcomes.weights * outcomes.verdict.num_accepted).sum())


# ------------------------------------------------ reuse of numbers between steps

Interval = tuple[float, float]
Key = Callable[[Purpose, int, int], tuple]  # (purpose, start, offset) -> name of the uniform that is used


@dataclass
class IntervalRandomness:
    """A Randomness for one row that knows each uniform only up to an interval, narrowed by every outcome it
    decided.

    Outcomes follow `script` (indices into the options that are still possible), then the first option;
    `branches` records how many there were, so that the caller can walk the whole tree. `weight` is the
    probability of the walk.
    """

    key: Key
    script: list[int]
    known: dict[tuple, Interval] = field(default_factory=dict)
    branches: list[int] = field(default_factory=list)
    weight: float = 1.0

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        coins = enumerate(probs[0].tolist())
        heads = [self._choose(self.key(purpose, int(start), i), [prob, 1.0]) == 0 for i, prob in coins]
        return torch.tensor([heads])

    def categorical(self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]) -> Tensor:
        cumulative = (weights[0].cumsum(0) / weights[0].sum()).tolist()
        assert isinstance(offset, int)
        return torch.tensor([self._choose(self.key(purpose, int(start), offset), cumulative)])

    def _choose(self, key: tuple, upper_ends: list[float]) -> int:
        # outcome j happens when the uniform lies in [upper_ends[j-1], upper_ends[j])
        low, high = self.known.get(key, (0.0, 1.0))
        ends = [0.0, *upper_ends[:-1], 1.0]
        cuts = [(max(low, a), min(high, b)) for a, b in itertools.pairwise(ends)]
        possible = [j for j, (a, b) in enumerate(cuts) if b - a > 1e-15]
        depth = len(self.branches)
        self.branches.append(len(possible))
        outcome = possible[self.script[depth] if depth < len(self.script) else 0]
        a, b = cuts[outcome]
        self.weight *= (b - a) / (high - low)
        self.known[key] = (a, b)
        return outcome


def interval_law(
    verify: Verify, target: TableModel, drafter: TableModel, gamma: int, key: Key, num_steps: int
) -> Law:
    """Joint law of `num_steps` real steps in a row (horizon gamma + 1) when `key` names the uniform each
    draw uses.
    """
    horizon, law = gamma + 1, {}
    script: list[int] | None = []
    while script is not None:
        rng = IntervalRandomness(key, script)
        path: Path = ()
        for _ in range(num_steps):
            if len(path) < horizon:
                path = path + _one_step(
                    verify, target, drafter, rng, path, min(gamma, horizon - len(path) - 1)
                )
        law[path] = law.get(path, 0.0) + rng.weight
        script = _next_script(script, rng.branches)
    return continued(law, target, horizon)


def _one_step(
    verify: Verify, target: TableModel, drafter: TableModel, rng: IntervalRandomness, path: Path, gamma: int
) -> Path:
    start, drafted = torch.tensor([len(path)]), path
    for offset in range(gamma):
        token = rng.categorical(drafter.law(drafted)[None], Purpose.DRAFT, start, offset)
        drafted = (*drafted, int(token))
    ends = [drafted[:n] for n in range(len(path), len(drafted) + 1)]
    draft = Draft(torch.tensor([drafted[len(path) :]], dtype=torch.int64).view(1, -1), torch.tensor([gamma]))
    draft.probs = torch.stack([drafter.law(end) for end in ends])[None]
    verdict = verify(draft, torch.stack([target.law(end) for end in ends])[None], rng, start)
    kept = drafted[len(path) : len(path) + int(verdict.num_accepted)]
    return (*kept, int(verdict.next_token))


def _next_script(script: list[int], branches: list[int]) -> list[int] | None:
    # depth-first: raise the deepest choice that has an option left
    taken = script + [0] * (len(branches) - len(script))
    for depth in reversed(range(len(branches))):
        if taken[depth] + 1 < branches[depth]:
            return [*taken[:depth], taken[depth] + 1]
    return None
