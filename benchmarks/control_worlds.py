"""Machines and texts without model or clock, for `control.py`: texts that are made up, and those of
`record_texts.py`.

A *text* says at each position whether the draft agrees with the target there and how much a look-up
would offer; a *machine* says what a step costs. Every length writes the same texts, as greedy
decoding does.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

MAX_NODES = 8
NEAR = 0.7  # rate at which ranks after the first fall off
NEVER = 99  # rank of a token that no draft would name


# ---------------------------------------------------------------- machines


@dataclass(frozen=True)
class Machine:
    """Milliseconds. The passes of this project's CPU: results/step-2026-11-21.json and, after 8
    tokens, step-2026-11-23.json, in an hour of fast memory and one of slow; a graphics card's are
    flat."""

    passes: tuple[float, ...]  # of the target over 1, 2, ... tokens
    draft: float = 0.0  # per token drafted
    start: float = 0.0  # per step that drafts
    empty: float = 0.0  # per step that asks and is offered nothing
    other: float = 0.3

    def ms(self, asked: int, drafted: int) -> float:
        """Of a step."""
        drafting = self.start + self.draft * drafted if drafted else self.empty * bool(asked)
        return self.other + self.passes[drafted] + drafting


CPU = (4.69, 4.74, 4.95, 5.02, 5.25, 5.52, 5.79, 6.21, 6.3)
SLOW_MEMORY = (6.89, 6.9, 6.9, 6.95, 7.0, 7.1, 7.2, 7.3, 7.35)
FLAT = (20.0, 20.0, 20.1, 20.1, 20.2, 20.2, 20.3, 20.3, 20.4)


# ---------------------------------------------------------------- texts


@dataclass
class Text:
    """One answer: at each position how likely draft and target agree there, the draft's rank of the
    target's token (1: they agree), and nodes it would offer at most."""

    chances: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    thoughts: int = 0  # tokens of them, in front of the answer

    def add(self, chance: float, rng: random.Random, offered: int = MAX_NODES) -> None:
        """Of what is no agreement, half is among the draft's next few."""
        self.chances.append(chance)
        near = 2 + int(rng.expovariate(NEAR)) if rng.random() < 0.5 else NEVER
        self.ranks.append(1 if rng.random() < chance else near)
        self.offered.append(offered)

    def __len__(self) -> int:
        return len(self.ranks)

    def kept(self, position: int, widths: Sequence[int]) -> int:
        """How many draft nodes the target would have emitted, too; `widths`: per depth, nodes that
        a kept path can go on with."""
        ahead = zip(self.ranks[position : position + len(widths)], widths, strict=False)
        depth = 0
        for rank, width in ahead:
            if rank > width:
                break
            depth += 1
        return depth

    def expected(self, position: int, widths: Sequence[int]) -> float:
        """How many on average, over texts that are as easy at each position."""
        product = 1.0
        total = 0.0
        for chance, width in zip(
            self.chances[position : position + len(widths)], widths, strict=False
        ):
            product *= chance + (1 - chance) / 2 * -math.expm1(-NEAR * (width - 1))
            total += product
        return total


@dataclass(frozen=True)
class RecordedText:
    """One answer as a drafter met it: at each position nodes offered, and how many of them, a
    chain, the target would keep."""

    offered: Sequence[int]
    agreed: Sequence[int]

    def __len__(self) -> int:
        return len(self.agreed)

    def kept(self, position: int, widths: Sequence[int]) -> int:
        return min(self.agreed[position], len(widths))

    def expected(self, position: int, widths: Sequence[int]) -> float:
        """There is this text only."""
        return self.kept(position, widths)


def chain(size: int) -> tuple[int, ...]:
    """Widths of a chain."""
    return (1,) * size


@cache
def ranking(size: int) -> dict[tuple[int, int], int]:
    """(depth, rank) of the nodes of a tree of so many -> how many nodes it must have to have this
    one: likeliest first."""
    nodes = [(depth, rank) for depth in range(size) for rank in range(1, 6)]
    value = {
        (depth, rank): 0.75**depth * (0.75 if rank == 1 else 0.16 * 0.6 ** (rank - 2))
        for depth, rank in nodes
    }
    return {
        node: rank
        for rank, node in enumerate(sorted(value, key=lambda node: -value[node])[:size], 1)
    }


@cache
def tree(size: int) -> tuple[int, ...]:
    """Widths of a tree of so many nodes."""
    return tuple(count for _, count in sorted(Counter(depth for depth, _ in ranking(size)).items()))


Write = Callable[[random.Random, int], Text]


def steady(alpha: float) -> Write:
    """Every token is as easy as any other."""

    def write(rng: random.Random, length: int) -> Text:
        text = Text()
        for _ in range(length):
            text.add(alpha, rng)
        return text

    return write


def decaying(first: float, last: float) -> Write:
    """The agreement of trained drafters falls over thousands of tokens: here by two thirds of its
    way in a quarter of a text."""

    def write(rng: random.Random, length: int) -> Text:
        text = Text()
        for position in range(length):
            text.add(last + (first - last) * math.exp(-4 * position / length), rng)
        return text

    return write


def thought_first(thought: float, answer: float, share: float = 0.8) -> Write:
    """Thoughts and the answer after them are not equally easy; a text's share of thoughts differs
    by a tenth or so."""

    def write(rng: random.Random, length: int) -> Text:
        text = Text(thoughts=round(length * min(1.0, rng.gauss(share, 0.1))))
        for position in range(length):
            text.add(thought if position < text.thoughts else answer, rng)
        return text

    return write


def varied(low: float, high: float) -> Write:
    """Every prompt has its own acceptance."""
    return lambda rng, length: steady(rng.uniform(low, high))(rng, length)


def bursts(easy: float, hard: float, mean_length: float) -> Write:
    """Easy and hard passages take turns."""

    def write(rng: random.Random, length: int) -> Text:
        text = Text()
        alpha = easy
        for _ in range(length):
            if rng.random() < 1 / mean_length:
                alpha = hard if alpha == easy else easy
            text.add(alpha, rng)
        return text

    return write


def copies(share: float, run: float, junk: float, alpha: float) -> Write:
    """A look-up: passages of `run` tokens that stand elsewhere, in so large a share of the text;
    between them some match of one to eight tokens is found at a `junk` share of positions, right
    with probability `alpha`."""

    def write(rng: random.Random, length: int) -> Text:
        text = Text()
        inside = False
        leave = 1 / run
        enter = share / (1 - share) / run
        for _ in range(length):
            inside = rng.random() >= leave if inside else rng.random() < enter
            if inside:
                text.add(0.97, rng)
            else:
                text.add(alpha, rng, rng.randint(1, MAX_NODES) if rng.random() < junk else 0)
        return text

    return write


@dataclass(frozen=True)
class Step:
    """`tokens`: expected ones, so that the luck of one run hides nothing."""

    drafted: int
    kept: int
    ran_out: bool
    budgets: list[int]  # of every kept node
    tokens: float
    ms: float


@dataclass(frozen=True)
class Kind:
    """Cells of one kind: a machine and the distribution of its texts; `write` None: they are
    recorded ones."""

    machine: Machine
    write: Write | None
    trees: bool = False
    # trees with one node at each depth, as of a model and a look-up that seldom disagree
    thin: bool = False
    # what the machine was when lengths were timed, where sizes compared otherwise then
    timed_on: Machine | None = None

    def step(self, text: Text | RecordedText, position: int, asked: int) -> Step:
        """One that asks for so many nodes."""
        drafted = min(asked, text.offered[position])
        widths = tree(drafted) if self.trees and not self.thin else chain(drafted)
        kept = text.kept(position, widths)
        expected = text.expected(position, widths)
        budgets = list(range(1, kept + 1))
        if isinstance(text, Text) and self.trees and not self.thin:
            ranks = text.ranks[position : position + kept]
            budgets = list(accumulate((ranking(drafted)[node] for node in enumerate(ranks)), max))
        return Step(
            drafted,
            kept,
            kept == len(widths),
            budgets,
            1 + expected,
            self.machine.ms(asked, drafted),
        )


_MODEL = {"draft": 0.2, "start": 0.4, "empty": 0.4}
_LOOKUP = {"draft": 0.0, "start": 0.05, "empty": 0.05}
KINDS: dict[str, Kind] = {
    "draft model, alpha 0.78": Kind(Machine(CPU, **_MODEL), steady(0.78)),
    "draft model, alpha 0.5": Kind(Machine(CPU, **_MODEL), steady(0.5)),
    "draft model, alpha 0.95": Kind(Machine(CPU, **_MODEL), steady(0.95)),
    "draft model, bursts": Kind(Machine(SLOW_MEMORY, **_MODEL), bursts(0.95, 0.5, 12)),
    "draft model, falls over a text": Kind(Machine(CPU, **_MODEL), decaying(0.9, 0.3)),
    "expensive draft model, falls over a text": Kind(Machine(CPU, draft=1.5, start=0.4, empty=0.4), decaying(0.9, 0.1)),
    "easy thoughts, hard answers": Kind(Machine(CPU, **_MODEL), thought_first(0.85, 0.6)),
    "hard thoughts, easy answers": Kind(Machine(CPU, **_MODEL), thought_first(0.6, 0.85)),
    "expensive draft model, easy thoughts, hard answers": Kind(
        Machine(CPU, draft=1.5, start=0.4, empty=0.4), thought_first(0.85, 0.6)
    ),
    "draft model, prompts differ": Kind(Machine(SLOW_MEMORY, **_MODEL), varied(0.45, 0.95)),
    "timed in a faster hour": Kind(Machine(SLOW_MEMORY, **_MODEL), steady(0.78), timed_on=Machine(CPU, **_MODEL)),
    "timed in a slower hour": Kind(Machine(CPU, **_MODEL), steady(0.78), timed_on=Machine(SLOW_MEMORY, **_MODEL)),
    "timed in a slower hour, alpha 0.5": Kind(Machine(CPU, **_MODEL), steady(0.5), timed_on=Machine(SLOW_MEMORY, **_MODEL)),
    "expensive draft model, alpha 0.6": Kind(Machine(CPU, draft=1.5, start=0.4, empty=0.4), steady(0.6)),
    "expensive draft model, alpha 0.2": Kind(Machine(CPU, draft=1.5, start=0.4, empty=0.4), steady(0.2)),
    "flat passes, alpha 0.8": Kind(Machine(FLAT, draft=1.2), steady(0.8)),
    "flat passes, bursts": Kind(Machine(FLAT, draft=1.2), bursts(0.95, 0.4, 15)),
    "trees, alpha 0.7": Kind(Machine(CPU, **_MODEL), steady(0.7), trees=True),
    "trees, bursts": Kind(Machine(SLOW_MEMORY, **_MODEL), bursts(0.9, 0.4, 12), trees=True),
    "thin trees, alpha 0.95": Kind(Machine(CPU, **_MODEL), steady(0.95), trees=True, thin=True),
    "thin trees, alpha 0.6": Kind(Machine(CPU, **_MODEL), steady(0.6), trees=True, thin=True),
    "thin trees, bursts": Kind(Machine(CPU, **_MODEL), bursts(0.98, 0.4, 20), trees=True, thin=True),
    "look-up, much copied": Kind(Machine(CPU, **_LOOKUP), copies(0.5, 12, 0.4, 0.3)),
    "look-up, some copied": Kind(Machine(SLOW_MEMORY, **_LOOKUP), copies(0.2, 8, 0.4, 0.3)),
    "look-up, nothing copied": Kind(Machine(CPU, **_LOOKUP), copies(0.001, 2, 0.35, 0.1)),
    "look-up, nothing found": Kind(Machine(CPU, **_LOOKUP), copies(0.001, 2, 0.0, 0.1)),
}  # fmt: skip


def recorded(content: dict[str, Any]) -> dict[str, tuple[Kind, list[RecordedText]]]:
    """The cells of a file of `record_texts.py`, on this project's CPU."""
    found: dict[str, tuple[Kind, list[RecordedText]]] = {}
    for cell in content["cells"]:
        lines = zip(cell["offered"], cell["kept"], strict=True)
        texts = [RecordedText([*map(int, offered)], [*map(int, kept)]) for offered, kept in lines]
        kind = Kind(Machine(CPU, **(_MODEL if cell["drafter"] == "draft-model" else _LOOKUP)), None)
        found[
            f"{cell['pair']} {cell['workload']}, T = {cell['temperature']:g}, {cell['drafter']}"
        ] = kind, texts
    return found
