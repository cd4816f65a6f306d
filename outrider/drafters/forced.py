"""Tokens that a row's grammar forces, drafted on top of what its drafter guesses.

Where a grammar leaves one continuation (`": ` after a key, the rest of a key, closing brackets), no
model is needed to guess it. A row's draft is followed along its trunk (the first child of each
node). Where the grammar forces tokens and the draft has none, or one that is forbidden, they are
added, and what a chain had there goes. Forced tokens are verified like any other: the target may
spell the same text in other tokens.

A token that was drawn from a distribution never goes: its absence would depend on its value, and the
text would no longer follow the target's law. What is forced depends on the grammar and on earlier
tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.drafters.base import Drafter
from outrider.rows import Rows
from outrider.sampling.constraint import Constraint
from outrider.trees.merge import part_verdict
from outrider.types import Draft, TargetOutput, Verdict

FORCED = "forced"  # who drafted them, in `Draft.parts`


@dataclass(frozen=True)
class _Growth:
    """One row's draft: how many nodes of the drafter stay, and the forced ones after node
    `parent`."""

    num_kept: int
    parent: int
    tokens: Sequence[int] = ()


@dataclass(frozen=True)
class Grown:
    """A draft with forced tokens, and the drafter's own, which is the same where none were added."""

    draft: Draft
    own: Draft
    growths: Sequence[_Growth] = ()

    @property
    def has_forced(self) -> bool:
        return self.draft is not self.own

    def own_output(self, output: TargetOutput) -> TargetOutput:
        """The target's output at the drafter's nodes, which come first."""
        if not self.has_forced:
            return output
        return TargetOutput(output.logits[:, : self.own.num_nodes + 1], output.hidden, output.kept)

    def own_verdict(self, verdict: Verdict) -> Verdict:
        """The verdict as the drafter sees it, on its own nodes; `verdict`: on the whole draft."""
        if not self.has_forced:
            return verdict
        nodes = [list(range(growth.num_kept)) for growth in self.growths]
        return part_verdict(self.own, nodes, self.draft, verdict)


def with_forced(own: Draft, drafter: Drafter, rows: Rows, max_nodes: int) -> Grown:
    """The drafter's proposal with the tokens that grammars force after it, up to `max_nodes` nodes a
    row."""
    if all(row.constraint is None for row in rows):  # most steps
        return Grown(own, own)
    own.parts = _parts(own, drafter, rows)
    growths = []
    for index, row in enumerate(rows):
        growth = None
        room = row.clamp_draft(max_nodes) if drafter.drafts_for(index) else 0
        if row.constraint is not None and room:
            place = _Place(own, index, room, drafter.may_lose_nodes(index))
            growth = place.growth(row.constraint)
        growths.append(growth or _Growth(own.lists[1][index], -1))
    if not any(growth.tokens for growth in growths):
        return Grown(own, own)
    return Grown(_grown(own, growths), own, growths)


def _parts(own: Draft, drafter: Drafter, rows: Rows) -> list[Sequence[str] | None]:
    """The drafter of each node, per row; None for rows without a grammar or parts."""
    parts = own.parts or [None] * len(rows)
    return [
        [drafter.name_for(index)] * own.lists[1][index]
        if parts[index] is None and row.constraint is not None
        else parts[index]
        for index, row in enumerate(rows)
    ]


@dataclass(frozen=True)
class _Place:
    """One row of a draft, and the nodes that it may have in all. `may_lose`: whether nodes that were
    not drawn may go."""

    own: Draft
    index: int
    room: int
    may_lose: bool

    def growth(self, constraint: Constraint) -> _Growth | None:
        """The forced tokens that the draft does not have, along its trunk; None: there are none."""
        tokens = self.own.lists[0][self.index]
        children = self.own.children[self.index]
        path: list[int] = []
        node = -1
        forced: list[int] = []
        while True:
            forced = forced or constraint.forced(path, self.room)
            below = children[node + 1]
            same = [child for child in below if forced and tokens[child] == forced[0]]
            if same:
                node = same[0]
                forced = forced[1:]
            elif below and (not forced or constraint.allowed([path])[0, tokens[below[0]]]):
                node = below[0]  # the drafter may know how the target spells what is forced
                forced = []
            else:
                return self._with(node, forced)
            path.append(tokens[node])

    def _with(self, node: int, forced: list[int]) -> _Growth | None:
        """`forced` after `node`; None where there is no room, or a node in the way that must stay.

        A chain ends at `node`. A tree in which nothing was drawn makes room: its last nodes go."""
        length = self.own.lists[1][self.index]
        num_kept = length
        if self.own.parents is None:
            num_kept = node + 1
            if num_kept < length and (not self.may_lose or self._is_drawn(num_kept)):
                return None
        elif self.own.probs is None and self.may_lose:
            num_kept = max(node + 1, min(length, self.room - len(forced)))
        tokens = forced[: max(0, self.room - num_kept)]
        return _Growth(num_kept, node, tokens) if tokens else None

    def _is_drawn(self, node: int) -> bool:
        own = self.own
        return own.probs is not None and (
            own.sampled is None or bool(own.sampled[self.index, node])
        )


def _grown(own: Draft, growths: Sequence[_Growth]) -> Draft:
    """`own`, cut and with forced tokens."""
    lengths = [growth.num_kept + len(growth.tokens) for growth in growths]
    width = max(lengths)
    device = own.tokens.device
    tokens = []
    parents = []
    is_own = []
    for index, growth in enumerate(growths):
        kept = own.lists[0][index][: growth.num_kept]
        padding = width - lengths[index]
        tokens.append([*kept, *growth.tokens, *[0] * padding])
        chain = range(growth.num_kept, lengths[index] - 1)
        after = [growth.parent, *chain][: len(growth.tokens)]
        parents.append([*own.parent_lists[index][: growth.num_kept], *after, *[-1] * padding])
        is_own.append([node < growth.num_kept for node in range(width)])
    draft = Draft(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(lengths, dtype=torch.int64, device=device),
        replacement=own.replacement,
    )
    if own.parents is not None:
        draft.parents = torch.tensor(parents, dtype=torch.int64, device=device)
    if own.probs is not None:
        extra = width - own.num_nodes
        draft.probs = F.pad(own.probs, (0, 0, 0, extra))[:, : width + 1]
        sampled = F.pad(own.is_sampled(), (0, extra))[:, :width]
        draft.sampled = sampled & torch.tensor(is_own, device=device)
    if own.parts is not None:
        draft.parts = [
            None if names is None else [*names[: growth.num_kept], *[FORCED] * len(growth.tokens)]
            for growth, names in zip(growths, own.parts, strict=True)
        ]
    if own.budgets is not None:
        draft.budgets = [
            None if growth.tokens else known
            for growth, known in zip(growths, own.budgets, strict=True)
        ]
    return draft
