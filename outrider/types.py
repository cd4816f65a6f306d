"""The data that flows through one speculative step, and the shape legend of the whole project.

    B rows of the batch     N draft nodes per row     V vocabulary     T tokens of a pass     H hidden

A draft is a tree given by parent indices; a chain is the special case `parents=None`. Node -1 stands for the pending
token: committed, in no KV cache yet, first token of the next target pass. So a target pass over N draft nodes has N + 1
outputs: output 0 follows the pending token, output 1 + i follows node i.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Draft:
    """What a drafter proposes for each row. Rows may be shorter than N: `lengths` says how many nodes count."""

    tokens: Tensor  # (B, N) int64
    lengths: Tensor  # (B,) int64, valid nodes of each row; the rest is padding
    parents: Tensor | None = None  # (B, N) int64, parents before children, -1 = pending token; None = a chain
    probs: Tensor | None = None  # (B, N+1, V): law the children of node i-1 were drawn from; None = deterministic
    sampled: Tensor | None = None  # (B, N) bool: drawn from that law (True) or placed deterministically; None = all alike

    @cached_property
    def lists(self) -> tuple[list[list[int]], list[int]]:
        """`tokens` and `lengths` on the host."""
        return self.tokens.tolist(), self.lengths.tolist()

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def is_sampled(self) -> Tensor:
        """(B, N) bool: the `sampled` field with its default filled in: sampled exactly when `probs` is given."""
        if self.sampled is not None:
            return self.sampled
        return torch.full_like(self.tokens, self.probs is not None, dtype=torch.bool)

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str = "cpu") -> Draft:
        """No proposal for any row: the step then is plain decoding."""
        return cls(
            tokens=torch.zeros(num_rows, 0, dtype=torch.int64, device=device),
            lengths=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


@dataclass
class Verdict:
    """What the verifier keeps of a draft, and the one token it adds (correction after a rejection, else bonus)."""

    path: Tensor  # (B, D) int64: kept node indices root -> leaf, -1 padded
    num_accepted: Tensor  # (B,) int64
    next_token: Tensor  # (B,) int64
    all_accepted: Tensor  # (B,) bool: the kept path reached the end of the draft (next_token is a bonus token)

    @cached_property
    def lists(self) -> VerdictLists:
        """The same on the host, where rows and caches live."""
        tensors = (self.path, self.num_accepted, self.next_token, self.all_accepted)
        return VerdictLists(*(tensor.tolist() for tensor in tensors))

    @classmethod
    def of_lists(cls, lists: VerdictLists, num_nodes: int, device: torch.device) -> Verdict:
        """A verdict reached on the host."""
        lines = [[*path, *rest] for path, *rest in zip(*lists, strict=True)]
        packed = torch.tensor(lines, dtype=torch.int64, device=device)  # one tensor: each costs as much as all
        verdict = cls(packed[:, :num_nodes], packed[:, -3], packed[:, -2], packed[:, -1].bool())
        verdict.lists = lists
        return verdict


class VerdictLists(NamedTuple):
    """A `Verdict` as Python lists, one entry a row."""

    path: list[list[int]]
    num_accepted: list[int]
    next_token: list[int]
    all_accepted: list[bool]


@dataclass
class TargetOutput:
    """One target pass over [pending token] + draft nodes."""

    logits: Tensor  # (B, N+1, V) as the model gives them
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> (B, N+1, H), only layers a drafter asked for
