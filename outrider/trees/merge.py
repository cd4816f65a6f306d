"""Several drafts as one tree: what composite drafting submits, and how each part is told what became of its own nodes.

The first draft may be drawn from laws; its nodes come first, so among siblings a drawn token is tried before the placed
ones. The others must be deterministic. A path that another draft already has is shared, not repeated. Placing a token or
finding it already there is decided by tokens that stay in the tree, so no drawn token is ever withheld.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict, VerdictLists

Places = list[list[int]]  # per row: a part's own node -> node of the merged tree


@dataclass
class Merged:
    """`places[p]` belongs to the p-th draft."""

    draft: Draft
    places: list[Places]


def merge_drafts(drafts: Sequence[Draft]) -> Merged:
    """One tree with all their nodes. Raises ValueError when a draft behind the first one was drawn from laws."""
    if any(draft.probs is not None for draft in drafts[1:]):
        raise ValueError("only the first of the merged drafts may be drawn from laws")
    first, device = drafts[0], drafts[0].tokens.device
    trees = [TokenTree() for _ in range(first.num_rows)]
    places = [[_place(tree, draft, row) for row, tree in enumerate(trees)] for draft in drafts]
    merged = to_draft(trees, device)
    if first.probs is not None:
        extra = merged.num_nodes - first.num_nodes
        merged.probs = F.pad(first.probs, (0, 0, 0, extra))
        node = torch.arange(merged.num_nodes, device=device)
        merged.sampled = F.pad(first.is_sampled(), (0, extra)) & (node < first.lengths[:, None])
        merged.parents = merged.parent_nodes().clone()
    return Merged(merged, places)


def part_verdict(draft: Draft, places: Places, merged: Verdict) -> Verdict:
    """The merged verdict as one part sees it: its own nodes as far as the kept path began with them."""
    paths, next_tokens, complete = [], [], []
    for row, path in enumerate(merged.lists.path):
        own = {place: node for node, place in reversed(list(enumerate(places[row])))}
        kept: list[int] = []
        for place in path[: merged.lists.num_accepted[row]]:
            if place not in own:
                break
            kept.append(own[place])
        paths.append(kept + [-1] * (draft.num_nodes - len(kept)))
        next_tokens.append(merged.lists.next_token[row])
        complete.append(not draft.children[row][(kept[-1] if kept else -1) + 1])
    lists = VerdictLists(paths, [sum(node >= 0 for node in path) for path in paths], next_tokens, complete)
    return Verdict.of_lists(lists, draft.num_nodes, draft.tokens.device)


def part_output(draft: Draft, places: Places, output: TargetOutput) -> TargetOutput:
    """The target's outputs at one part's own nodes: logits (B, own N + 1, V)."""
    columns = [[0, *(place + 1 for place in line)] + [0] * (draft.num_nodes - len(line)) for line in places]
    index = torch.tensor(columns, device=output.logits.device)
    rows = torch.arange(len(columns), device=index.device)[:, None]
    return TargetOutput(output.logits[rows, index])


def _place(tree: TokenTree, draft: Draft, row: int) -> list[int]:
    """Put one row of a draft into a tree; where each of its nodes went."""
    tokens, length = draft.lists[0][row], draft.lists[1][row]
    parents = draft.parent_nodes()[row].tolist()
    place: list[int] = []
    for node in range(length):
        parent = -1 if parents[node] < 0 else place[parents[node]]
        place.append(tree.add(parent, tokens[node]))
    return place
