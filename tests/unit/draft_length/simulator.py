"""A world without model and clock: how many nodes are kept is drawn at random with a seed, what a
step costs is a formula.

The controller's score is that of its choices: expected tokens and seconds of every length it asked
for, so that the luck of one run hides nothing.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from outrider.draft_length import AutoLength, Goodput
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from outrider.step import StepFacts
from outrider.types import Draft, Verdict, VerdictLists
from tests.helpers import make_row

Cost = Callable[[int, int], float]  # (nodes of the widest row, rows) -> seconds


@dataclass
class World:
    """One drafter on one machine. A pass of the target over one token takes 1."""

    alpha: float  # conditional acceptance of each token of a chain
    cost: Cost
    offers: float = 1.0  # how often there is anything to offer
    empty_s: float = 0.0  # seconds that an ask costs which brings nothing
    tree: Callable[[int], float] | None = None  # nodes -> expected kept nodes, instead of a chain
    depth: int = 12  # of trees: the most that can be kept
    noise: float = 0.0
    outliers: float = 0.0  # how often a step takes five times as long
    # nodes of the widest row -> distinct experts of a pass; None: no mixture
    experts: Callable[[int], float] | None = None

    def kept(self, size: int, rng: random.Random) -> int:
        if self.tree is not None:
            return sum(rng.random() < self.tree(size) / self.depth for _ in range(self.depth))
        return next((depth for depth in range(size) if rng.random() >= self.alpha), size)

    def seconds(self, width: int, rows: int, rng: random.Random) -> float:
        factor = 1 + self.noise * rng.gauss(0, 1)
        return (
            self.cost(width, rows) * max(factor, 0.2) * (5 if rng.random() < self.outliers else 1)
        )

    def tokens(self, size: int) -> float:
        """Expected tokens of a row's step that asks for `size`."""
        kept = (
            self.tree(size)
            if self.tree is not None
            else sum(self.alpha**depth for depth in range(1, size + 1))
        )
        return 1 + self.offers * kept

    def price(self, size: int, rows: int = 1) -> float:
        """Expected seconds of a step that asks for `size` (one row only where offers are rare)."""
        return self.offers * self.cost(size, rows) + (1 - self.offers) * (
            self.cost(0, rows) + self.empty_s * bool(size)
        )


class Batch(list[Row]):
    """Rows, and what their drafts must bring."""

    prices: Sequence[float] = ()


@dataclass
class Run:
    """One controller in a world that may change."""

    control: Goodput
    seed: int = 0
    num_rows: int = 1
    length: int = 10**6  # tokens of a request; then another one takes its place
    unit: float = 1.0  # seconds of a pass over one token
    asked: list[int] = field(default_factory=list)  # sizes, step by step
    earned: float = 0.0
    spent: float = 0.0
    rows: list[Row] = field(default_factory=list)
    rows_asked: int = 0  # in the latest step

    def __post_init__(self) -> None:
        self._rng, self._length = random.Random(self.seed), AutoLength({"a": self.control})

    def steps(self, world: World, count: int) -> Run:
        for _ in range(count):
            self._step(world)
        return self

    def _step(self, world: World) -> None:
        rng = self._rng
        self.rows = [row for row in self.rows if row.room > 0][: self.num_rows]
        while len(self.rows) < self.num_rows:
            self.rows.append(_row(self.length))
        gamma = list(self._length.choose(Batch(self.rows)))  # type: ignore[arg-type]
        drafted = [size if rng.random() < world.offers else 0 for size in gamma]
        kept = [world.kept(size, rng) for size in drafted]
        seconds = world.seconds(max(drafted), len(self.rows), rng) + world.empty_s * (
            max(gamma) > max(drafted) == 0
        )
        for row, accepted in zip(self.rows, kept, strict=True):
            row.stats.steps += 1
            seconds += 10 * (row.stats.steps == 1)  # the prompt
            row.max_tokens -= accepted + 1  # as if they had been emitted
        facts = StepFacts(
            self.rows,
            gamma,
            _draft(drafted),
            _verdict(drafted, kept),
            self.unit * seconds,
            0.0,
            experts=None if world.experts is None else world.experts(max(drafted)),
        )  # type: ignore[arg-type]
        self._length.observe(facts)
        self.asked.append(max(gamma))
        self.rows_asked = sum(map(bool, gamma))
        self.earned += sum(map(world.tokens, gamma))
        self.spent += world.price(max(gamma), len(self.rows))

    def flips(self, after: int = 0) -> int:
        """How often the length changed, probes counted."""
        return sum(a != b for a, b in itertools.pairwise(self.asked[after:]))

    @property
    def rate(self) -> float:
        return self.earned / self.spent

    @property
    def counts(self) -> Counter[int]:
        return Counter(self.asked)


def best_rate(world: World, sizes: list[int], num_rows: int = 1) -> float:
    """Tokens per second of the best fixed size."""
    return max(num_rows * world.tokens(size) / world.price(size, num_rows) for size in sizes)


def plain_rate(world: World, num_rows: int = 1) -> float:
    return num_rows / world.price(0, num_rows)


def linear(draft: float, verify: float = 0.0) -> Cost:
    """Each drafted token costs `draft`; the target's pass costs `verify` more for each."""
    return lambda width, rows: 1 + (draft + verify) * width


def _row(length: int) -> Row:
    return make_row([0], SamplingParams(max_tokens=length))


def _draft(drafted: list[int]) -> Draft:
    tokens = torch.zeros(len(drafted), max(drafted), dtype=torch.int64)
    return Draft(tokens, torch.tensor(drafted))


def _verdict(drafted: list[int], kept: list[int]) -> Verdict:
    width = max(drafted)
    paths = [[*range(count), *[-1] * (width - count)] for count in kept]
    complete = [count == size for count, size in zip(kept, drafted, strict=True)]
    return Verdict.of_lists(
        VerdictLists(paths, kept, [0] * len(kept), complete), width, torch.device("cpu")
    )
