"""Merged drafts: one tree, honest distributions, and for every part the verdict on its own nodes."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling.params import SamplingParams
from outrider.trees.merge import Merged, merge_drafts, part_output, part_verdict
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict, VerdictLists
from tests import oracle
from tests.contract.test_exact_distribution import EXACT, FILTERS, pair, verifier_named
from tests.contract.test_exact_distribution_trees import SHAPES
from tests.oracle_trees import shape, tree_accepted, tree_bias, tree_drafts

TREE_VERIFIERS = ("traversal", "multi-round", "gumbel")
PLAIN = FILTERS["plain"]


def chains(*rows: list[int]) -> Draft:
    width = max(map(len, rows))
    return Draft(
        torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        torch.tensor([len(row) for row in rows]),
    )


def trees(*rows: list[tuple[int, int]]) -> Draft:
    """Rows of (parent, token)."""
    grown = []
    for row in rows:
        grown.append(TokenTree())
        for parent, token in row:
            grown[-1].add(parent, token)
    return to_draft(grown, "cpu")


def verdict_of(paths: list[list[int]], next_tokens: list[int], width: int) -> Verdict:
    lists = VerdictLists(
        [path + [-1] * (width - len(path)) for path in paths],
        [len(path) for path in paths],
        next_tokens,
        [False] * len(paths),
    )
    return Verdict.of_lists(lists, width, torch.device("cpu"))


# ------------------------------------------------ the tree


def test_common_beginnings_are_shared() -> None:
    """A path given twice would be paid for twice, and its second copy could never be accepted."""
    merged = merge_drafts([chains([5, 6, 7]), chains([5, 6, 9, 1])])
    assert merged.draft.tokens.tolist() == [[5, 6, 7, 9, 1]]
    assert merged.draft.parents.tolist() == [[-1, 0, 1, 1, 3]]
    assert merged.node_maps == [[[0, 1, 2]], [[0, 1, 3, 4]]]
    assert merged.draft.probs is None


def test_rows_of_different_lengths() -> None:
    """Padding must become no node; a row may have nothing from any part."""
    merged = merge_drafts(
        [chains([5, 6], [4], []), trees([(-1, 8)], [(-1, 4), (0, 2), (0, 3)], [])]
    )
    assert merged.draft.lengths.tolist() == [3, 3, 0]
    assert merged.draft.tokens.tolist() == [[5, 6, 8], [4, 2, 3], [0, 0, 0]]
    assert merged.draft.parents.tolist() == [[-1, 0, -1], [-1, 0, 0], [-1, -1, -1]]
    assert merged.node_maps == [[[0, 1], [0], []], [[2], [0, 1, 2], []]]


def test_equal_chains_stay_a_chain() -> None:
    assert merge_drafts([chains([1, 2]), chains([1])]).draft.parents is None


def test_drawn_nodes_come_first_and_keep_their_distributions() -> None:
    """Moved or unmarked, a drawn token would be verified against another node's distribution."""
    drawn = chains([2, 1], [0])
    drawn.probs = torch.rand(2, 3, 4).softmax(-1)
    merged = merge_drafts([drawn, chains([3, 1], [0, 2])]).draft
    assert merged.tokens.tolist() == [[2, 1, 3, 1], [0, 2, 0, 0]]
    assert merged.sampled.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert torch.equal(merged.probs[:, :3], drawn.probs)
    assert merged.probs.shape == (2, 5, 4)
    assert merged.parents.tolist() == [[-1, 0, -1, 2], [-1, 0, -1, -1]]


def test_a_drawn_tree_stays_as_it_is() -> None:
    """A distribution without tokens for a shape's last sibling repeats one: shared with the first,
    the nodes after it would be verified against other nodes' distributions."""
    drawn = Draft(
        torch.tensor([[1, 1, 2, 0]]),
        torch.tensor([4]),
        torch.tensor([[-1, -1, 0, 1]]),
        torch.rand(1, 5, 3).softmax(-1),
        torch.tensor([[True, False, True, True]]),
    )
    merged = merge_drafts([drawn, chains([1, 0])])
    assert merged.draft.tokens.tolist() == [[1, 1, 2, 0, 0]]
    assert merged.draft.parents.tolist() == [[-1, -1, 0, 1, 0]]
    assert merged.draft.sampled.tolist() == [[True, False, True, True, False]]
    assert torch.equal(merged.draft.probs[:, :5], drawn.probs)
    assert merged.node_maps == [[[0, 1, 2, 3]], [[0, 4]]]


def test_what_cannot_be_merged_is_refused() -> None:
    """Two sampled drafts would need two distributions per node; equal siblings drawn with
    replacement would share one node."""
    drawn = chains([1])
    drawn.probs = torch.full((1, 2, 3), 1 / 3)
    with pytest.raises(ValueError, match="only the first"):
        merge_drafts([chains([1]), drawn])
    again = Draft(
        torch.tensor([[1, 1]]),
        torch.tensor([2]),
        torch.tensor([[-1, -1]]),
        torch.full((1, 3, 3), 1 / 3),
    )
    again.replacement = True
    with pytest.raises(ValueError, match="with replacement"):
        merge_drafts([again, chains([1])])


# ------------------------------------------------ what a part hears


def test_a_part_hears_of_its_own_nodes() -> None:
    """The path is 5 6 9 1: the first part's nodes end after 6, and the text's next token is then 9,
    not the verifier's."""
    parts = [chains([5, 6, 7]), chains([5, 6, 9, 1]), chains([8])]
    merged = merge_drafts(parts)
    verdict = verdict_of([[0, 1, 3, 4]], [77], merged.draft.num_nodes)
    heard = [
        part_verdict(p, nodes, merged.draft, verdict).lists
        for p, nodes in zip(parts, merged.node_maps, strict=True)
    ]
    assert [h.path for h in heard] == [[[0, 1, -1]], [[0, 1, 2, 3]], [[-1]]]
    assert [h.num_accepted for h in heard] == [[2], [4], [0]]
    assert [h.next_token for h in heard] == [[9], [77], [5]]
    assert [h.all_accepted for h in heard] == [[False], [True], [False]]


def test_a_part_without_nodes_hears_the_text_alone() -> None:
    parts = [chains([5], [3]), chains([], [3, 4])]
    merged = merge_drafts(parts)
    verdict = verdict_of([[0], []], [9, 8], merged.draft.num_nodes)
    heard = part_verdict(parts[1], merged.node_maps[1], merged.draft, verdict).lists
    assert (heard.path, heard.next_token, heard.all_accepted) == (
        [[-1, -1], [-1, -1]],
        [5, 8],
        [True, False],
    )


def test_outputs_are_those_of_the_parts_nodes() -> None:
    """Column 0 follows the pending token, 1 + i the part's own node i; hidden states are the whole
    pass's."""
    parts = [chains([5, 6], [4]), trees([(-1, 8), (0, 1)], [(-1, 4), (0, 2)])]
    merged = merge_drafts(parts)
    width = merged.draft.num_nodes + 1
    logits = torch.arange(2 * width).view(2, width, 1).float()
    output = part_output(
        parts[1], merged.node_maps[1], TargetOutput(logits, {3: -logits}, [[0, 1], [0]])
    )
    assert output.logits[..., 0].tolist() == [[0, 3, 4], [width, width + 1, width + 2]]
    assert torch.equal(output.hidden[3], -logits)
    assert output.kept == [[0, 1], [0]]


# ------------------------------------------------ the distribution


def merged_proposals(drawn: oracle.Proposals, foreign: list[int]) -> oracle.Proposals:
    merged: Merged = merge_drafts([drawn.draft, chains(*[foreign] * len(drawn.paths))])
    return oracle.Proposals([()] * len(drawn.paths), drawn.weights, merged.draft)


@pytest.mark.parametrize("verifier", TREE_VERIFIERS)
@pytest.mark.parametrize("filters", ["plain", "top_k", "penalties", "greedy"])
@pytest.mark.parametrize("foreign", [[0], [1, 2], [2, 0]])
def test_distribution_is_the_targets(verifier: str, filters: str, foreign: list[int]) -> None:
    """A drawn chain beside somebody else's path, whichever tokens they share: no bias at all."""
    target, drafter = pair(3, 3, 2, FILTERS[filters], PLAIN)
    assert (
        tree_bias(
            verifier_named(verifier),
            target,
            merged_proposals(oracle.sampled_drafts(drafter, 2), foreign),
        )
        < EXACT
    )


@pytest.mark.parametrize("verifier", TREE_VERIFIERS)
@pytest.mark.parametrize("filters", ["plain", "top_k", "greedy"])
@pytest.mark.parametrize("foreign", [[0], [1, 2], [2, 0, 1]])
@pytest.mark.parametrize("name", [*SHAPES, "after a repeated sibling"])
def test_distribution_beside_a_tree(
    verifier: str, filters: str, foreign: list[int], name: str
) -> None:
    """A head's tree, drawn or placed, beside somebody else's path: no bias at all."""
    shapes = SHAPES | {"after a repeated sibling": ([-1, -1, -1, 0, 2], "sssss")}
    target, drafter = pair(2, 3, 3, FILTERS[filters], FILTERS["top_k"])
    drawn = tree_drafts(drafter, shape(*shapes[name]))
    assert tree_bias(verifier_named(verifier), target, merged_proposals(drawn, foreign)) < EXACT


@pytest.mark.parametrize("verifier", TREE_VERIFIERS)
def test_distribution_with_stop_rules(verifier: str) -> None:
    """Rows of different lengths: behind a short chain stands a foreign node where others have a
    distribution."""
    target, drafter = pair(2, 3, 2, PLAIN, PLAIN)
    drawn = oracle.sampled_drafts(drafter, 2, stop=lambda path: path == (1,))
    assert tree_bias(verifier_named(verifier), target, merged_proposals(drawn, [1, 0])) < EXACT


def test_unmarked_foreign_nodes_would_be_biased() -> None:
    """The mutation that the tests above must find: a placed node that claims to have been drawn."""
    target, drafter = pair(3, 3, 2, PLAIN, PLAIN)
    proposals = merged_proposals(oracle.sampled_drafts(drafter, 2), [1, 2])
    proposals.draft.sampled = None
    assert tree_bias(verifier_named("multi-round"), target, proposals) > 0.01


@pytest.mark.parametrize("verifier", ["traversal", "multi-round"])
def test_a_second_path_is_worth_something(verifier: str) -> None:
    """Losing it would be invisible to every test of the distribution."""
    target, drafter = pair(7, 3, 2, SamplingParams(temperature=1.0), PLAIN)
    drawn = oracle.sampled_drafts(drafter, 2)
    likely = int(target.probs(()).argmax())
    alone = oracle.expected_accepted(verifier_named("token"), target, drawn)
    together = tree_accepted(verifier_named(verifier), target, merged_proposals(drawn, [likely, 0]))
    assert together > alone + 0.01
