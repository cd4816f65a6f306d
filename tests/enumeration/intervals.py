"""Several steps in a row on one set of keyed numbers: a number met again by a later step would be
conditioned by the first.

Instead of drawing, each uniform is known only up to an interval, which every outcome that it
decided narrows; the whole tree of outcomes is walked. Independent numbers give the product of the
steps' distributions; a number used twice does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.sampling.rng import Purpose
from outrider.types import Draft
from tests.enumeration.enumerate import UnsoundError, Verify
from tests.enumeration.tables import Joint, Path, TableModel, continued

Interval = tuple[float, float]
# (purpose, start, offset) -> name of the uniform that is used
Key = Callable[[Purpose, int, int], tuple]


def keyed_by_step(purpose: Purpose, start: int, offset: int) -> tuple:
    """The key of a draw by its step, as `KeyedStreams` makes it."""
    return (purpose, start, offset)


@dataclass
class IntervalRandomness:
    """A Randomness for one row that knows each uniform only up to an interval, narrowed by every
    outcome it decided.

    Outcomes follow `script` (indices into the options that are still possible), then the first
    option; `branches` records how many there were, so that the caller can walk the whole tree.
    `weight` is the probability of the walk.
    """

    key: Key
    script: list[int]
    known: dict[tuple, Interval] = field(default_factory=dict)
    branches: list[int] = field(default_factory=list)
    weight: float = 1.0

    def bernoulli(self, probs: Tensor, purpose: Purpose, start: Tensor) -> Tensor:
        coins = enumerate(probs[0].tolist())
        heads = [
            self._choose(self.key(purpose, int(start), i), [prob, 1.0]) == 0 for i, prob in coins
        ]
        return torch.tensor([heads])

    def categorical(
        self, weights: Tensor, purpose: Purpose, start: Tensor, offset: int | list[int]
    ) -> Tensor:
        cumulative = (weights[0].cumsum(0) / weights[0].sum()).tolist()
        position = offset if isinstance(offset, int) else offset[0]
        return torch.tensor([self._choose(self.key(purpose, int(start), position), cumulative)])

    def gumbel(self, positions: Tensor, vocab_size: int) -> Tensor:
        raise UnsoundError("Gumbel noise has no intervals")

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


def interval_joint(
    verify: Verify, target: TableModel, drafter: TableModel, gamma: int, key: Key, num_steps: int
) -> Joint:
    """Joint distribution of `num_steps` real steps in a row (horizon gamma + 1) when `key` names
    the uniform each draw uses."""
    horizon = gamma + 1
    joint: Joint = {}
    script: list[int] | None = []
    while script is not None:
        rng = IntervalRandomness(key, script)
        path: Path = ()
        for _ in range(num_steps):
            if len(path) < horizon:
                path = path + _one_step(
                    verify, target, drafter, rng, path, min(gamma, horizon - len(path) - 1)
                )
        joint[path] = joint.get(path, 0.0) + rng.weight
        script = next_script(script, rng.branches)
    return continued(joint, target, horizon)


def _one_step(
    verify: Verify,
    target: TableModel,
    drafter: TableModel,
    rng: IntervalRandomness,
    path: Path,
    gamma: int,
) -> Path:
    start = torch.tensor([len(path)])
    drafted = path
    for offset in range(gamma):
        token = rng.categorical(drafter.probs(drafted)[None], Purpose.DRAFT, start, offset)
        drafted = (*drafted, int(token))
    ends = [drafted[:n] for n in range(len(path), len(drafted) + 1)]
    draft = Draft(
        torch.tensor([drafted[len(path) :]], dtype=torch.int64).view(1, -1), torch.tensor([gamma])
    )
    draft.probs = torch.stack([drafter.probs(end) for end in ends])[None]
    verdict = verify(draft, torch.stack([target.probs(end) for end in ends])[None], rng, start)
    kept = drafted[len(path) : len(path) + int(verdict.num_accepted)]
    return (*kept, int(verdict.next_token))


def next_script(script: list[int], branches: list[int]) -> list[int] | None:
    """The walk after this one, depth-first: the deepest choice that has an option left takes it.
    None: all were walked."""
    taken = script + [0] * (len(branches) - len(script))
    for depth in reversed(range(len(branches))):
        if taken[depth] + 1 < branches[depth]:
            return [*taken[:depth], taken[depth] + 1]
    return None
