"""The row-by-row form of tree verification against the batched one, on random trees of every kind
of node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.traversal import traverse_batched
from outrider.sampling.tree import multi_round_batched
from outrider.sampling.tree_rows import Judge, judge_leaves_first, judge_top_down, row_by_row
from outrider.types import Draft

VOCAB = 6
Batched = Callable[[torch.Tensor, Draft], tuple[torch.Tensor, torch.Tensor]]


@st.composite
def trees(draw: st.DrawFn) -> tuple[Draft, torch.Tensor]:
    """Rows of different lengths; drawn, placed and mixed nodes; siblings with and without
    replacement; unused distributions."""
    num_rows = draw(st.integers(1, 3))
    num_nodes = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    p, q = (
        torch.randn(num_rows, num_nodes + 1, VOCAB, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    kind = draw(st.sampled_from(["placed", "drawn", "mixed"]))
    replacement = kind == "drawn" and draw(st.booleans())
    parents = [
        [draw(st.integers(-1, node - 1)) for node in range(num_nodes)] for _ in range(num_rows)
    ]
    tokens = torch.zeros(num_rows, num_nodes, dtype=torch.int64)
    for row, tree in enumerate(parents):
        for node, parent in enumerate(tree):
            taken = {int(tokens[row, other]) for other in range(node) if tree[other] == parent}
            free = [token for token in range(VOCAB) if replacement or token not in taken]
            tokens[row, node] = draw(st.sampled_from(free))
    draft = Draft(
        tokens,
        torch.tensor([draw(st.integers(0, num_nodes)) for _ in range(num_rows)]),
        torch.tensor(parents),
        probs=None if kind == "placed" else q.softmax(-1),
        replacement=replacement,
    )
    if kind == "mixed":
        draft.sampled = torch.tensor(
            [[draw(st.booleans()) for _ in range(num_nodes)] for _ in range(num_rows)]
        )
    return draft, p.softmax(-1)


@pytest.mark.parametrize(
    ("batched", "judge"),
    [(multi_round_batched, judge_top_down), (traverse_batched, judge_leaves_first)],
)
@given(case=trees())
@settings(max_examples=150, deadline=None)
def test_row_by_row_is_the_batched_form(
    batched: Batched, judge: Judge, case: tuple[Draft, torch.Tensor]
) -> None:
    """Catches a sibling distribution that is not renewed, a mass that is forgotten, padding that
    counts, an input overwritten."""
    draft, p = case
    before = p.clone(), None if draft.probs is None else draft.probs.clone()
    keep, weights = row_by_row(p, draft, judge)
    expected_keep, expected_weights = batched(p, draft)
    torch.testing.assert_close(keep, expected_keep, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-9, atol=1e-12)
    assert torch.equal(p, before[0])
    assert draft.probs is None or torch.equal(draft.probs, before[1])
