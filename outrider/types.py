"""The data that flows through one speculative step, and the shape legend of the whole project.

    B rows of the batch     N draft nodes per row     V vocabulary     T tokens of a pass     H hidden

A draft is a tree given by parent indices; a chain is the special case `parents=None`. Node -1
stands for the pending token: committed, in no KV cache yet, first token of the next target pass. So
a target pass over N draft nodes has N + 1 outputs: output 0 follows the pending token, output 1 + i
follows node i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Draft:
    """A drafter's proposal for each row. Rows may be shorter than N: `lengths` says how many nodes
    count."""

    tokens: Tensor  # (B, N) int64
    lengths: Tensor  # (B,) int64, valid nodes of each row; the rest is padding
    # (B, N) int64, parents before children, -1 = pending token; None = a chain
    parents: Tensor | None = None
    # (B, N+1, V): distribution the children of node i-1 were drawn from; None = deterministic
    probs: Tensor | None = None
    # (B, N) bool: drawn from `probs` (True) or placed deterministically; None = all alike
    sampled: Tensor | None = None
    # Siblings stand in the order they were drawn. Each was drawn from the parent's distribution
    # without the tokens of its earlier siblings (renormalised), or, with replacement, from the
    # whole distribution every time.
    replacement: bool = False
    # Per row and node: how many nodes must be asked for to be drafted this one, too; None: unknown,
    # of a row or of all. Never less than its parent's.
    budgets: Sequence[Sequence[int] | None] | None = None
    # Per row and node: who drafted it, a part of a composite or `forced`; None: the drafter alone,
    # of a row or of all.
    parts: Sequence[Sequence[str] | None] | None = None

    @cached_property
    def lists(self) -> tuple[list[list[int]], list[int]]:
        """`tokens` and `lengths` on the host."""
        if self.tokens.device.type == "cpu" or self.tokens.device != self.lengths.device:
            return self.tokens.tolist(), self.lengths.tolist()
        lines = torch.cat([self.tokens, self.lengths[:, None]], dim=1).tolist()  # sync: one copy
        return [line[:-1] for line in lines], [line[-1] for line in lines]

    @cached_property
    def children(self) -> list[list[list[int]]]:
        """[b][0]: nodes that follow the pending token; [b][1 + n]: nodes that follow node n. In
        order, on the host."""
        return [
            _children(parents, length)
            for parents, length in zip(self.parent_lists, self.lists[1], strict=True)
        ]

    @cached_property
    def parent_lists(self) -> list[list[int]]:
        """`parent_nodes` on the host; a chain's without a tensor, for it is asked for at every
        greedy step."""
        if self.parents is not None:
            return self.parents.tolist()
        return [list(range(-1, self.num_nodes - 1))] * self.num_rows

    @cached_property
    def levels(self) -> list[list[int]]:
        """[b][0] = 0, the pending token's; [b][1 + n]: draft tokens on the path to node n, itself
        included. On the host."""
        levels = []
        for parents in self.parent_lists:
            line = [0]
            for parent in parents:  # parents stand before their children
                line.append(line[parent + 1] + 1)
            levels.append(line)
        return levels

    def parent_nodes(self) -> Tensor:
        """(B, N) int64: the `parents` field with its default, a chain, filled in."""
        if self.parents is not None:
            return self.parents
        return torch.arange(-1, self.num_nodes - 1, device=self.tokens.device).expand_as(
            self.tokens
        )

    def depths(self) -> Tensor:
        """(B, N+1) int64: how many draft tokens come before each output. 0 for the pending token's."""
        return torch.tensor(self.levels, dtype=torch.int64, device=self.tokens.device).view(
            self.num_rows, -1
        )

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def is_sampled(self) -> Tensor:
        """(B, N) bool: the `sampled` field with its default filled in: sampled exactly when `probs`
        is given."""
        if self.sampled is not None:
            return self.sampled
        return torch.full_like(self.tokens, self.probs is not None, dtype=torch.bool)

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str = "cpu") -> Draft:
        """No proposal for any row: the step then is plain decoding."""
        draft = cls(*_nothing(num_rows, device))
        # every plain step asks for them
        draft.lists = [[] for _ in range(num_rows)], [0] * num_rows
        return draft


@lru_cache(maxsize=64)
def _nothing(num_rows: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Tokens and lengths of empty drafts. Made once: the first tensor operation after a pass costs
    30 us, whichever it is."""
    lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return lengths[:, None][:, :0], lengths


def _children(parents: list[int], length: int) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node in range(length):
        children[parents[node] + 1].append(node)
    return children


class Verdict:
    """The part of a draft that the verifier keeps, and the one token it adds (correction after a
    rejection, else bonus).

    Reached as tensors or on the host; the other form is made when somebody asks for it, which in a
    greedy step nobody does.
    """

    # of a verdict reached on the host: nodes of the draft, and where it is
    _origin: tuple[int, torch.device]

    def __init__(
        self, path: Tensor, num_accepted: Tensor, next_token: Tensor, all_accepted: Tensor
    ) -> None:
        """path (B, D) int64: kept node indices root -> leaf, -1 padded. num_accepted (B,) int64.
        next_token (B,) int64. all_accepted (B,) bool: the kept path ends at a leaf, nothing was
        rejected there (next_token is a bonus)."""
        self._tensors = (path, num_accepted, next_token, all_accepted)

    @classmethod
    def of_lists(cls, lists: VerdictLists, num_nodes: int, device: torch.device) -> Verdict:
        """A verdict reached on the host."""
        verdict = cls.__new__(cls)
        verdict.lists = lists
        verdict._origin = (num_nodes, device)
        return verdict

    @property
    def path(self) -> Tensor:
        return self._tensors[0]

    @property
    def num_accepted(self) -> Tensor:
        return self._tensors[1]

    @property
    def next_token(self) -> Tensor:
        return self._tensors[2]

    @property
    def all_accepted(self) -> Tensor:
        return self._tensors[3]

    @cached_property
    def lists(self) -> VerdictLists:
        """On the host, where rows and caches live."""
        path, *rest = self._tensors
        if path.device.type == "cpu":
            return VerdictLists(*(tensor.tolist() for tensor in self._tensors))
        # sync: one copy
        lines = torch.cat([path, *(flag.long()[:, None] for flag in rest)], dim=1).tolist()
        counts, tokens, are_all = ([line[number] for line in lines] for number in (-3, -2, -1))
        return VerdictLists(
            [line[:-3] for line in lines], counts, tokens, [flag == 1 for flag in are_all]
        )

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_nodes, device = self._origin
        lines = [[*path, *rest] for path, *rest in zip(*self.lists, strict=True)]
        # one tensor: each costs as much as all
        packed = torch.tensor(lines, dtype=torch.int64, device=device)
        return packed[:, :num_nodes], packed[:, -3], packed[:, -2], packed[:, -1].bool()


class VerdictLists(NamedTuple):
    """A `Verdict` as Python lists, one entry a row."""

    path: list[list[int]]
    num_accepted: list[int]
    next_token: list[int]
    all_accepted: list[bool]


@dataclass
class TargetOutput:
    """One target pass over [pending token] + draft nodes, and what of it was committed."""

    logits: Tensor  # (B, N+1, V) as the model gives them
    # layer -> (B, M+1, H), only layers a drafter asked for; of the whole pass, even where `logits`
    # were cut to the nodes of one of several drafters
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    # per row, the columns of `hidden` that belong to the text now: 0, the token that was pending,
    # then the kept nodes on their path. Their tokens are row.tokens[-1 - len(kept) : -1]
    kept: list[list[int]] = field(default_factory=list)
