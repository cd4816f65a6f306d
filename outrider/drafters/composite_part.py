"""One drafter of a composite: what it drafts for a step, and what that is worth to each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.drafters.base import Drafter
from outrider.drafters.chain_survival import ChainSurvival
from outrider.types import Draft

SMOOTHING = 0.1  # weight of the newest measurement
TRY_AFTER = 64  # steps after which a row lets a model that it never asked show what it is worth now


@dataclass
class Part:
    """One drafter in the composite."""

    name: str
    drafter: Drafter
    # it runs a model or a trained head: its time counts, and it may draw from distributions
    is_model: bool
    survival: ChainSurvival = field(default_factory=ChainSurvival)
    draft: Draft | None = None  # of this step
    # of this step, with what it would draft for rows that another part drafts for
    guess: Draft | None = None
    seconds_per_token: float = 0.0
    nodes_per_level: float = 0.0  # of its latest trees; 0: it has drafted chains alone
    # by number of a row: steps since it had a node of this part
    unused: dict[int, int] = field(default_factory=dict)
    # numbers of the rows that asked it in this step to see what it is worth by now
    tried: frozenset[int] = frozenset()
    # rows of this step whose texts it has not read to their end
    waiting: frozenset[int] = frozenset()

    def ready(self, budget: list[int]) -> list[int]:
        """Nodes per row, none for rows that wait."""
        return [0 if index in self.waiting else count for index, count in enumerate(budget)]

    def choose_tries(self) -> None:
        """A model is asked again by rows that have long not asked it: once one of them is due, by
        all that are half as late."""
        due = self.is_model and max(self.unused.values(), default=0) >= TRY_AFTER
        self.tried = frozenset(
            number for number, steps in self.unused.items() if due and 2 * steps >= TRY_AFTER
        )

    def count_unused(self, numbers: Sequence[int], gamma: Sequence[int]) -> None:
        """Count a step for each row that asked for nodes and got none of this part."""
        assert self.draft is not None, "a step without a draft"
        steps = zip(numbers, gamma, self.draft.lists[1], strict=True)
        self.unused = {
            number: 0 if drafted else self.unused.get(number, 0) + (asked > 0)
            for number, asked, drafted in steps
        }

    def worth(self, num_nodes: int, number: int) -> list[float]:
        """Expected kept tokens of each of its first nodes: of a chain its chance of being kept, of
        a tree an equal share of its level's."""
        width = max(1.0, self.nodes_per_level)
        chances = self.survival.curve(math.ceil(num_nodes / width), number)
        return [chances[int(node / width)] / width for node in range(num_nodes)]

    def is_reshaped(self, index: int) -> bool:
        """Whether, asked for fewer nodes, it would have drafted another tree for a row than the
        first nodes of this one."""
        draft = self.draft
        assert draft is not None, "a step without a draft"
        if draft.parents is None or not draft.lists[1][index]:
            return False
        return draft.budgets is None or draft.budgets[index] is None

    def submit(self, draft: Draft, rows: Sequence[bool]) -> None:
        """Offer this step's draft to these rows only; for the others it is a guess."""
        self.guess = self.draft = draft
        if draft.parents is not None and (num_nodes := sum(draft.lists[1])):
            levels = sum(depth(draft, index) for index in range(draft.num_rows))
            self.nodes_per_level = smoothed(self.nodes_per_level, num_nodes / levels)
        if not all(rows):
            self.draft = replace(
                draft, lengths=draft.lengths * torch.tensor(rows, device=draft.lengths.device)
            )

    def learn(self, index: int, number: int, emitted: Sequence[int]) -> None:
        """Compare what this part guessed for a row with the tokens that the row emitted.

        A guess that was passed over is judged by them. A model that was tried and mostly right is
        tried again at once.
        """
        assert self.guess is not None, "commit without propose"
        assert self.draft is not None, "commit without propose"
        if (
            number in self.tried
            and (length := self.draft.lists[1][index])
            and 2 * _agreed(self.draft, index, emitted) > length
        ):
            self.unused[number] = TRY_AFTER
        if self.guess.lists[1][index] and not self.draft.lists[1][index]:
            tested = min(depth(self.guess, index), len(emitted))
            self.survival.observe(number, tested, _agreed(self.guess, index, emitted))


def depth(draft: Draft, index: int) -> int:
    """Levels of one row's draft."""
    return max(draft.levels[index][: draft.lists[1][index] + 1])


def _agreed(draft: Draft, index: int, emitted: Sequence[int]) -> int:
    """How many of these tokens, from the first one on, one row's draft has on a path."""
    tokens = draft.lists[0][index]
    children = draft.children[index]
    node = -1
    for level, token in enumerate(emitted):
        node = next((child for child in children[node + 1] if tokens[child] == token), -1)
        if node < 0:
            return level
    return len(emitted)


def smoothed(mean: float, value: float) -> float:
    """The mean with a new value; 0: there was none."""
    return value if mean == 0 else mean + SMOOTHING * (value - mean)
