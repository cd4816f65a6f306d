"""Several drafts as one tree: what composite drafting submits, and the verdict on each part's own
nodes.

The first draft, a chain or a tree, may be drawn from distributions. Its nodes come first and stay
as they are, so among siblings a drawn token is tried before the placed ones. The others must be
deterministic. A path that an earlier draft already has is shared, not repeated. Placing a token or
finding it already there is decided by tokens that stay in the tree, so no drawn token is ever
withheld.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict, VerdictLists

NodeMap = list[list[int]]  # per row: a part's own node -> node of the merged tree


@dataclass
class Merged:
    """`node_maps[p]` belongs to the p-th draft."""

    draft: Draft
    node_maps: list[NodeMap]


def merge_drafts(drafts: Sequence[Draft]) -> Merged:
    """One tree with all their nodes.

    Raises ValueError when a later draft was drawn from distributions, or the first one with
    replacement, because equal siblings that were drawn separately cannot share a node.
    """
    if any(draft.probs is not None for draft in drafts[1:]):
        raise ValueError("only the first of the merged drafts may be drawn from distributions")
    first = drafts[0]
    device = drafts[0].tokens.device
    if first.replacement:
        raise ValueError("a draft with siblings drawn with replacement cannot be merged")
    trees = [TokenTree() for _ in range(first.num_rows)]
    node_maps = [
        [
            _merged_nodes(tree, draft, row, shares=draft is not first)
            for row, tree in enumerate(trees)
        ]
        for draft in drafts
    ]
    merged = to_draft(trees, device)
    if first.probs is not None:
        _keep_probs(merged, first, first.probs)
    return Merged(merged, node_maps)


def part_verdict(draft: Draft, node_map: NodeMap, merged: Draft, verdict: Verdict) -> Verdict:
    """The verdict on the merged tree as one part sees it.

    Its kept nodes are the kept path as far as that began with nodes of the part; the next token of
    the text is its `next_token`, whether another part's node or the verifier's own token.
    """
    paths = []
    next_tokens = []
    complete = []
    for row, (path, count) in enumerate(
        zip(verdict.lists.path, verdict.lists.num_accepted, strict=True)
    ):
        node_of = {merged_node: node for node, merged_node in enumerate(node_map[row])}
        accepted = [node_of[node] for node in _beginning(path[:count], node_of)]
        left = len(accepted) < count
        paths.append(accepted + [-1] * (draft.num_nodes - len(accepted)))
        next_tokens.append(
            merged.lists[0][row][path[len(accepted)]] if left else verdict.lists.next_token[row]
        )
        complete.append(not draft.children[row][accepted[-1] + 1 if accepted else 0])
    counts = [sum(node >= 0 for node in path) for path in paths]
    return Verdict.of_lists(
        VerdictLists(paths, counts, next_tokens, complete), draft.num_nodes, draft.tokens.device
    )


def part_output(draft: Draft, node_map: NodeMap, output: TargetOutput) -> TargetOutput:
    """The target's outputs at one part's own nodes: logits (B, own N + 1, V); hidden states of the
    whole pass, as ever."""
    columns = [
        [0, *(node + 1 for node in line)] + [0] * (draft.num_nodes - len(line)) for line in node_map
    ]
    index = torch.tensor(columns, device=output.logits.device)
    rows = torch.arange(len(columns), device=index.device)[:, None]
    return TargetOutput(output.logits[rows, index], output.hidden, output.kept)


def _merged_nodes(tree: TokenTree, draft: Draft, row: int, *, shares: bool) -> list[int]:
    """Put one row of a draft into a tree; where each of its nodes went. `shares`: an equal node
    that is there serves. (Where a distribution has no tokens left for a shape's last siblings, a
    drawn tree repeats one, whose place the distributions after it need.)"""
    put = tree.add if shares else tree.append
    tokens = draft.lists[0][row]
    length = draft.lists[1][row]
    parents = draft.parent_lists[row]
    node_map: list[int] = []
    for node in range(length):
        parent = -1 if parents[node] < 0 else node_map[parents[node]]
        node_map.append(put(parent, tokens[node]))
    return node_map


def _keep_probs(merged: Draft, first: Draft, probs: torch.Tensor) -> None:
    """The first draft's distributions, padded to the merged tree; its nodes keep their positions."""
    extra = merged.num_nodes - first.num_nodes
    node = torch.arange(merged.num_nodes, device=merged.tokens.device)
    merged.probs = F.pad(probs, (0, 0, 0, extra))
    merged.sampled = F.pad(first.is_sampled(), (0, extra)) & (node < first.lengths[:, None])
    merged.parents = merged.parent_nodes().clone()  # a tree's verifier reads `sampled` node by node


def _beginning(path: list[int], node_of: dict[int, int]) -> list[int]:
    """The path up to the first node that is not in `node_of`."""
    return path[
        : next((depth for depth, node in enumerate(path) if node not in node_of), len(path))
    ]
