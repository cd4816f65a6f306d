"""The shape of recycled trees, what fills it, and what a step teaches."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch

from outrider.drafters.lookup.recycling import (
    RANK_ACCEPTANCE,
    UNKNOWN,
    FollowerTable,
    RecyclingDrafter,
    RecyclingSettings,
    ShapeNode,
    tree_shape,
)
from outrider.errors import ConfigError
from outrider.rows import Rows
from outrider.types import Draft, TargetOutput, Verdict
from tests.unit.drafters.fake_target import join, step

V = 40


def _drafter(
    rows: list[list[int]], num_nodes: int = 16, top_k: int = 8
) -> tuple[RecyclingDrafter, Rows]:
    drafter = RecyclingDrafter(V, num_nodes, RecyclingSettings(top_k))
    batch = Rows(V, torch.device("cpu"))
    for prompt in rows:
        join(drafter, batch, prompt)
    return drafter, batch


def _next(token: int) -> int:
    return (token + 7) % V


def _chance(shape: list[ShapeNode], node: int) -> float:
    path = []
    while node >= 0:
        path.append(RANK_ACCEPTANCE[shape[node].rank])
        node = shape[node].parent
    return prod(path)


def test_shape_by_hand() -> None:
    """The first nodes under (0.5, 0.15, 0.08, ...): 0.5, 0.25, 0.15, 0.125, 0.08, then 0.075 twice."""
    expected = [(-1, 0), (0, 0), (-1, 1), (1, 0), (-1, 2), (0, 1), (2, 0)]
    assert [tuple(node) for node in tree_shape(7, 8)] == expected


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_shape_takes_the_likeliest_nodes(top_k: int) -> None:
    """Catches a shape that is not the best for its size, repeats a node, or puts a child before its
    parent."""
    shape = tree_shape(40, top_k)
    assert len(set(shape)) == 40
    chances = [_chance(shape, node) for node in range(40)]
    assert chances == sorted(chances, reverse=True)
    assert all(parent < node for node, (parent, _) in enumerate(shape))
    left_out = {(p, rank) for p in range(-1, 40) for rank in range(top_k)} - set(shape)
    best = max(
        (1.0 if p < 0 else _chance(shape, p)) * RANK_ACCEPTANCE[rank] for p, rank in left_out
    )
    assert best <= chances[-1] * (1 + 1e-9)


def test_smaller_shapes_begin_larger_ones() -> None:
    """A row with fewer nodes takes a prefix of the shape: catches one where that is another tree."""
    assert all(tree_shape(size, 8) == tree_shape(64, 8)[:size] for size in range(64))


def test_unknown_favourites_leave_holes() -> None:
    """Catches a guess of token -1, and nodes whose parent is missing hung somewhere else."""
    table = FollowerTable(V, 2)
    table.update([1, 2], np.array([[2, 3], [4, UNKNOWN]], dtype=np.int32))
    nodes = ((-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0), (2, 0), (3, 0))
    shape = [ShapeNode(*node) for node in nodes]
    tree = table.grow(1, shape, budget=9)
    assert (tree.tokens, tree.parents) == ([2, 3, 4], [-1, -1, 0])
    assert len(table.grow(30, shape, budget=9)) == 0


def test_known_branches_take_the_room_of_unknown_ones() -> None:
    """Catches nodes wasted where no token is known: behind 1 all is known, behind its favourite 8
    nothing."""
    drafter, rows = _drafter([[1]], num_nodes=3)
    step(drafter, rows, [0], _next)
    rows[0].tokens[-1] = 1
    assert drafter.propose(rows, [3]).tokens.tolist() == [[8, 9, 10]]


def test_rejected_nodes_teach_too() -> None:
    """Catches a table that learns from accepted nodes only: there most of the knowledge is lost."""
    drafter, rows = _drafter([[1]], num_nodes=3)
    step(drafter, rows, [3], _next)  # nothing known: only the pending token 1 is fed
    assert drafter._table.favourites[1].tolist() == list(range(8, 16))
    drafter._table.favourites[8] = [20, 21, 22, 23, 24, 25, 26, 27]  # wrong: the target says 15
    draft = step(drafter, rows, [3], _next)
    assert draft.tokens.tolist() == [[20, 21, 22]]
    assert rows[0].output == [8, 15]
    for token in (8, 20, 21, 22):
        assert drafter._table.favourites[token].tolist() == [_next(token + i) for i in range(8)]


def test_the_text_itself_counts_more_than_a_rejected_branch() -> None:
    """Catches the last node written winning: token 5 was fed twice, and only one of its contexts is
    the text."""
    drafter, rows = _drafter([[1]], num_nodes=4, top_k=1)
    tokens = torch.tensor([[5, 6, 9, 5]])
    parents = torch.tensor([[-1, 0, -1, 2]])
    draft = Draft(tokens, torch.tensor([4]), parents)
    # behind: pending, node 0 (5, kept), node 1, node 2, node 3 (5, rejected)
    best = torch.tensor([[5, 6, 30, 31, 32]])
    logits = torch.nn.functional.one_hot(best, V).float()
    verdict = Verdict(
        torch.tensor([[0, 1, -1, -1]]), torch.tensor([2]), torch.tensor([30]), torch.tensor([True])
    )
    rows.append(draft, verdict, logits)
    drafter.commit(rows, draft, verdict, TargetOutput(logits))
    assert {token: drafter._table.favourites[token, 0] for token in (1, 5, 6, 9)} == {
        1: 5,
        5: 6,
        6: 30,
        9: 31,
    }


def test_padding_teaches_nothing() -> None:
    """Catches padding nodes (token 0) of a shorter row taken for drafted ones."""
    drafter, rows = _drafter([[1, 2, 3, 1], [9]])
    draft = step(drafter, rows, [3, 0], _next)
    assert draft.lengths.tolist() == [3, 0]
    assert drafter._table.favourites[0].tolist() == [UNKNOWN] * 8


def test_everything_is_accepted_once_everything_was_seen() -> None:
    """Catches favourites stored behind the wrong token: this target depends on the last token
    alone."""
    drafter, rows = _drafter([[1]], num_nodes=4, top_k=1)
    while len(rows[0].output) < V:
        step(drafter, rows, [4], _next)
    steps = rows[0].stats.steps
    for _ in range(5):
        step(drafter, rows, [4], _next)
    assert rows[0].stats.steps == steps + 5
    assert rows[0].origins[-25:] == ["accepted", "accepted", "accepted", "accepted", "bonus"] * 5


def test_a_prompt_stands_in_until_a_token_was_fed() -> None:
    """Catches a prompt that overwrites what the target emitted, or is not used."""
    drafter, rows = _drafter([[1]])
    step(drafter, rows, [0], _next)
    join(drafter, rows, [1, 2, 3])
    assert drafter._table.favourites[:4, 0].tolist() == [UNKNOWN, 8, 3, UNKNOWN]


def test_a_row_that_moves_takes_its_length_along() -> None:
    """Catches the wrong pending token after a row left: its favourites would stand behind another
    token."""
    drafter, rows = _drafter([[1, 2, 3], [4], [5, 6]])
    rows.swap_remove(0)
    drafter.stop(0)
    step(drafter, rows, [0, 0], _next)
    known = {token for token in range(V) if drafter._table.favourites[token, 1] != UNKNOWN}
    assert known == {4, 6}


def test_each_row_gets_no_more_than_it_may() -> None:
    """Catches a budget taken from the neighbour, and a row without any."""
    drafter, rows = _drafter([[1], [2], [3]])
    for _ in range(V):
        step(drafter, rows, [0, 0, 0], _next)
    assert drafter.propose(rows, [5, 0, 16]).lengths.tolist() == [5, 0, 16]


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        RecyclingSettings(top_k=9)
