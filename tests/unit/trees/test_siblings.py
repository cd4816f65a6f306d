"""Counting which sibling is kept."""

from __future__ import annotations

import pytest
import torch

from outrider.trees.siblings import PRIOR_WEIGHT, REFRESH, SiblingAcceptance
from outrider.types import Draft, Verdict

#        pending
#        0     1        node 1 has three children, node 3 one
#            2 3 4
#              5
PARENTS = [-1, -1, 1, 1, 1, 3]


def step(*paths: list[int], length: int = 6) -> tuple[Draft, Verdict]:
    """One step in which every row drafted the tree above and kept this path."""
    rows = len(paths)
    draft = Draft(
        torch.zeros(rows, 6, dtype=torch.int64),
        torch.full((rows,), length),
        torch.tensor([PARENTS] * rows),
    )
    padded = [path + [-1] * (6 - len(path)) for path in paths]
    counts = torch.tensor([len(path) for path in paths])
    return draft, Verdict(
        torch.tensor(padded),
        counts,
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.bool),
    )


@pytest.mark.parametrize(
    ("path", "measured"),
    [
        ([], [0.0, 0.0, None]),  # only the pending token's children were tried
        ([0], [1.0, 0.0, None]),  # node 0 has none
        ([1], [0.0, 1 / 2, 0.0]),  # the pending token's two, then node 1's three
        ([1, 3], [0.0, 1.0, 0.0]),  # ... then node 3's only child, rejected
        ([1, 3, 5], [1 / 3, 1.0, 0.0]),
        ([1, 4], [0.0, 1 / 2, 1.0]),
    ],
)
def test_every_kept_node_tries_its_children(path: list[int], measured: list[float | None]) -> None:
    """Catches siblings counted under nodes that were never reached, and a last node that is
    forgotten."""
    counts = SiblingAcceptance([0.5, 0.2, 0.1])
    counts.count(*step(path))
    assert counts.measured() == measured


def test_rows_add_up_and_padding_does_not_count() -> None:
    counts = SiblingAcceptance([0.5, 0.2, 0.1])
    counts.count(*step([0], []))
    assert counts.measured() == [1 / 2, 0.0, None]
    counts.count(*step([], length=1))  # one child only: the second was never there
    assert counts.measured() == [1 / 3, 0.0, None]
    counts.count(*step([], length=0))
    assert counts.measured() == [1 / 3, 0.0, None]


def test_ranks_beyond_the_known_ones_are_passed_over() -> None:
    counts = SiblingAcceptance([0.5])
    counts.count(*step([1, 4]))
    assert counts.measured() == [0.0]


def test_the_estimate_moves_from_the_prior_to_what_is_measured_now_and_then() -> None:
    """A plan that changed with every step would make seeded texts depend on every step before."""
    counts = SiblingAcceptance([0.6, 0.2])
    for number in range(REFRESH):
        assert counts.estimate() == (0.6, 0.2), number
        counts.count(*step([0]))  # one observation a step: node 0 has no children
    expected = (
        (REFRESH + PRIOR_WEIGHT * 0.6) / (REFRESH + PRIOR_WEIGHT),
        PRIOR_WEIGHT * 0.2 / (REFRESH + PRIOR_WEIGHT),
    )
    assert counts.estimate() == pytest.approx(expected, abs=1e-3)
    before = counts.estimate()
    counts.count(*step([]))
    assert counts.estimate() == before
