"""The interface of verifiers: from a draft and the target's distributions to the kept path and one
more token.

A verifier draws only through the `Randomness` it is given, and the shape of its draws depends on
shapes alone, never on values: so the exact-distribution oracle can replace the randomness by an
enumeration of every outcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.sampling.rng import Purpose, Randomness
from outrider.settings import NoSettings
from outrider.types import Draft, Verdict, VerdictLists


class Verifier(ABC):
    """The acceptance rule. Stateless: one object serves every batch."""

    name: ClassVar[str]
    lossless: ClassVar[bool]
    shape: ClassVar[str] = "chain"  # "tree": takes trees, of which a chain is one
    coupled: ClassVar[bool] = (
        False  # chooses with keyed noise a drafter may share (drafter-invariant sampling)
    )

    Settings: ClassVar[type] = NoSettings

    @classmethod
    def build(cls, settings: Any) -> Verifier:
        """One with these settings, an instance of its `Settings`."""
        return cls()

    @abstractmethod
    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        """Keep a path of the draft from its root and add one token.

        target_probs (B, N+1, V): the distribution after the pending token and after each node.
        positions (B,): text index of each row's first draft token (= number of committed tokens).
        Only the first lengths[b] nodes of row b count.
        """


def check(verifier: Verifier, draft: Draft, target_probs: Tensor) -> None:
    """Shapes once at entry; a tree is refused by name where only chains are known."""
    if draft.parents is not None and verifier.shape != "tree":
        raise CapabilityError(
            f"verifier '{verifier.name}' takes chains, got a tree; use 'traversal' or 'multi-round'"
        )
    outputs = (draft.num_rows, draft.num_nodes + 1)
    if tuple(target_probs.shape[:2]) != outputs:
        raise ValueError(
            f"target_probs (B, N+1, V) must begin with {outputs}, got {tuple(target_probs.shape)}"
        )
    if draft.probs is not None and draft.probs.shape != target_probs.shape:
        raise ValueError(
            f"draft.probs {tuple(draft.probs.shape)} must equal target_probs "
            f"{tuple(target_probs.shape)}"
        )


def chain_verdict(draft: Draft, num_accepted: Tensor, next_token: Tensor) -> Verdict:
    """The Verdict of a kept prefix: num_accepted and next_token (B,)."""
    node = torch.arange(draft.num_nodes, device=draft.tokens.device).expand(draft.num_rows, -1)
    return Verdict(
        path=node.masked_fill(node >= num_accepted[:, None], -1),
        num_accepted=num_accepted,
        next_token=next_token,
        all_accepted=num_accepted == draft.lengths,
    )


def prefix_verdict(draft: Draft, counts: list[int], next_tokens: list[int]) -> Verdict:
    """`chain_verdict` reached on the host."""
    lists = VerdictLists(
        path=[[*range(count), *[-1] * (draft.num_nodes - count)] for count in counts],
        num_accepted=counts,
        next_token=next_tokens,
        all_accepted=[
            count == length for count, length in zip(counts, draft.lists[1], strict=True)
        ],
    )
    return Verdict.of_lists(lists, draft.num_nodes, draft.tokens.device)


def path_verdict(draft: Draft, ends: list[int], next_tokens: list[int]) -> Verdict:
    """The Verdict that keeps, in every row, the path from the root to node `ends[b]` (-1: nothing)."""
    paths = [_path(parents, end) for parents, end in zip(draft.parent_lists, ends, strict=True)]
    lists = VerdictLists(
        path=[path + [-1] * (draft.num_nodes - len(path)) for path in paths],
        num_accepted=[len(path) for path in paths],
        next_token=next_tokens,
        all_accepted=[not tree[end + 1] for tree, end in zip(draft.children, ends, strict=True)],
    )
    return Verdict.of_lists(lists, draft.num_nodes, draft.tokens.device)


def finish_tree(
    draft: Draft,
    ends: list[int],
    weights: Tensor,
    target_probs: Tensor,
    rng: Randomness,
    positions: Tensor,
) -> Verdict:
    """Draw the token that follows each row's kept path, from the weights (B, N+1, V) of the output
    it ends at."""
    output = torch.tensor(ends, device=weights.device) + 1
    rows = torch.arange(draft.num_rows, device=weights.device)
    chosen = weights[rows, output]
    # without mass p = q there, which is only reached by rounding: then p itself
    chosen = torch.where(chosen.sum(dim=-1, keepdim=True) > 0, chosen, target_probs[rows, output])
    return path_verdict(
        draft, ends, rng.categorical(chosen, Purpose.RESAMPLE, positions, 0).tolist()
    )


def agreeing_ends(draft: Draft, choice: list[list[int]]) -> list[int]:
    """The last node of each row on the path where every token is the target's own choice (B, N+1)
    before it."""
    return [_agreeing_end(*row) for row in zip(draft.children, draft.lists[0], choice, strict=True)]


def longest_ends(draft: Draft, is_good: Tensor) -> list[int]:
    """The end of each row's longest path of good nodes (B, N) bool; the first of equally long ones."""
    ends = []
    for parents, length, good in zip(
        draft.parent_lists, draft.lists[1], is_good.tolist(), strict=True
    ):
        # of the path of good nodes that ends here; 0 where it is broken
        depth = [0] * (len(parents) + 1)
        for node in range(length):
            whole = parents[node] < 0 or depth[parents[node] + 1] > 0
            depth[node + 1] = depth[parents[node] + 1] + 1 if good[node] and whole else 0
        ends.append(max(range(len(depth)), key=lambda output: (depth[output], -output)) - 1)
    return ends


def _agreeing_end(children: list[list[int]], tokens: list[int], choice: list[int]) -> int:
    end = -1
    while True:
        matches = [node for node in children[end + 1] if tokens[node] == choice[end + 1]]
        if not matches:
            return end
        end = matches[0]


def _path(parents: list[int], end: int) -> list[int]:
    path: list[int] = []
    while end >= 0:
        path.append(end)
        end = parents[end]
    return path[::-1]
