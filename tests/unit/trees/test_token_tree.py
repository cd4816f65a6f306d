"""Trees of guessed tokens, and how they become a draft."""

from __future__ import annotations

import torch

from outrider.trees.token_tree import TokenTree, to_draft


def test_common_beginnings_are_shared() -> None:
    """Catches siblings with the same token: the second one would never be accepted, and is paid
    for."""
    tree = TokenTree()
    for path in ([5, 6, 7], [5, 6, 8], [9], [5, 6, 7]):
        tree.add_path(path, budget=10)
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8, 9], [-1, 0, 1, 1, -1])
    assert tree.add(1, 8) == 3
    assert tree.add(-1, 8) == 5  # the same token elsewhere is another node
    assert len(tree) == 6


def test_the_budget_counts_nodes_not_tokens_of_paths() -> None:
    """Catches a node too many, and a shared beginning that is paid for twice."""
    tree = TokenTree()
    tree.add_path([1, 2, 3], budget=2)
    assert tree.tokens == [1, 2]
    tree.add_path([1, 2, 4], budget=3)
    assert (tree.tokens, tree.parents) == ([1, 2, 4], [-1, 0, 1])
    tree.add_path([7], budget=3)
    tree.add_path([], budget=9)
    assert len(tree) == 3
    tree.add_path([6, 6], budget=5, parent=0)
    assert (tree.tokens[3:], tree.parents[3:]) == ([6, 6], [0, 3])
    nothing = TokenTree()
    nothing.add_path([1], budget=0)
    assert len(nothing) == 0


def tree_of(*paths: list[int]) -> TokenTree:
    tree = TokenTree()
    for path in paths:
        tree.add_path(path, budget=100)
    return tree


def test_chains_stay_chains() -> None:
    """`parents=None` is what chain verifiers and faster passes take."""
    draft = to_draft([tree_of([1, 2, 3]), tree_of(), tree_of([4])], "cpu")
    assert draft.parents is None
    assert draft.probs is None
    assert draft.tokens.tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert draft.lengths.tolist() == [3, 0, 1]


def test_one_tree_makes_all_rows_trees() -> None:
    """Catches padding that hangs on a node, and rows cut to the length of another."""
    draft = to_draft([tree_of([1, 2]), tree_of([1], [2], [2, 3])], "cpu")
    assert draft.tokens.tolist() == [[1, 2, 0], [1, 2, 3]]
    assert draft.parents is not None
    assert draft.parents.tolist() == [[-1, 0, -1], [-1, -1, 1]]
    assert draft.lengths.tolist() == [2, 3]
    assert draft.children == [[[0], [1], [], []], [[0, 1], [], [2], []]]


def test_nobody_guesses() -> None:
    """Catches shapes (B,) where (B, 0) is meant, and types that no gather takes."""
    for count in (0, 1, 3):
        draft = to_draft([TokenTree() for _ in range(count)], "cpu")
        assert draft.tokens.shape == (count, 0)
        assert draft.lengths.shape == (count,)
        assert draft.parents is None
        assert draft.tokens.dtype == torch.int64
        assert draft.lengths.dtype == (torch.int64 if count else draft.lengths.dtype)


def test_the_first_nodes_are_a_tree() -> None:
    """Catches parents and later guesses that are lost in the shorter tree, and a longer one that is
    changed."""
    tree = tree_of([5, 6, 7], [5, 8], [9])
    tree.append(-1, 5)  # an equal sibling: later guesses share the first
    first = tree.first(4)
    assert (first.tokens, first.parents) == ([5, 6, 7, 8], [-1, 0, 1, 0])
    assert [first.add(-1, 5), first.add(0, 8), first.add(-1, 9)] == [0, 3, 4]
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8, 9, 5], [-1, 0, 1, 0, -1, -1])
    assert tree.first(6).add(-1, 5) == 0
    assert tree.first(6) is tree
    assert tree.first(7) is tree
    assert (tree.first(0).tokens, tree.first(0).parents) == ([], [])
