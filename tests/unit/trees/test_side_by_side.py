"""Drafts of several drafters in one, each row whole."""

from __future__ import annotations

import torch

from outrider.trees.side_by_side import side_by_side
from outrider.types import Draft


def chain(tokens: list[list[int]], lengths: list[int], with_probs: bool = False) -> Draft:
    shape = (len(tokens), len(tokens[0]) + 1, 3)
    return Draft(
        torch.tensor(tokens),
        torch.tensor(lengths),
        probs=torch.full(shape, 1 / 3) if with_probs else None,
    )


def test_drafts_side_by_side_keep_their_rows_whole() -> None:
    """A drawn chain, a deterministic tree and nothing, of different widths."""
    tokens = torch.tensor([[1, 2, 1]] * 3)
    lengths = torch.tensor([0, 3, 0])
    tree = Draft(tokens, lengths, parents=torch.tensor([[-1, -1, 0]] * 3), budgets=[[1, 2, 4]] * 3)
    drawn = chain([[0, 2], [0, 0], [0, 0]], [2, 0, 0], with_probs=True)
    both = side_by_side([drawn, tree], [0, 1, 0])
    assert both.lists == ([[0, 2, 0], [1, 2, 1], [0, 0, 0]], [2, 3, 0])
    assert both.parent_lists[0][:2] == [-1, 0]
    assert both.parent_lists[1] == [-1, -1, 0]
    assert both.is_sampled()[0, :2].all()
    assert not both.is_sampled()[1].any()
    assert both.probs is not None
    assert both.probs[1].sum() == 0
    assert both.budgets == [None, [1, 2, 4], None]
    alone = side_by_side([drawn, tree], [0, 0, 0])
    assert alone.parents is None
    assert alone.tokens is drawn.tokens
    assert side_by_side([chain([[0]] * 3, [0, 0, 0]), tree], [0, 1, 1]).budgets == tree.budgets


def test_siblings_drawn_with_replacement_stay_so_beside_another_drafter() -> None:
    """Catches a distribution that is not the target's: equal siblings would be taken for drawn from
    what the first one left."""
    siblings = Draft(
        torch.tensor([[2, 2]] * 2),
        torch.tensor([2, 0]),
        parents=torch.tensor([[-1, -1]] * 2),
        probs=torch.full((2, 3, 3), 1 / 3),
        replacement=True,
    )
    found = chain([[0], [1]], [0, 1])
    assert side_by_side([siblings, found], [0, 1]).replacement
    assert side_by_side([found, siblings], [1, 0]).replacement
    assert not side_by_side([found, chain([[1], [0]], [1, 0], with_probs=True)], [1, 0]).replacement
