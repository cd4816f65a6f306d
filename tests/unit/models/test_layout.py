"""Masks and depths against the sentence they implement: a node sees the prefix, its ancestors and
itself, within the window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.layout import attention_mask, tree_depths_and_ancestors
from outrider.models.pass_plan import QUERY_BLOCK

KEYS = 64


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int | None]:
    """Parents and committed length of one to three rows, and a window."""
    num_nodes = draw(st.integers(0, 9))
    num_rows = draw(st.integers(1, 3))
    parents = [
        [draw(st.integers(-1, node - 1)) for node in range(num_nodes)] for _ in range(num_rows)
    ]
    starts = [draw(st.integers(0, 40)) for _ in range(num_rows)]
    return parents, starts, draw(st.none() | st.integers(1, 12))


def path_to(parents: list[int], token: int) -> list[int]:
    """Columns of the pass on the way to `token` (0 = the pending token), itself included."""
    path = [token]
    while path[-1] != 0:
        path.append(parents[path[-1] - 1] + 1)
    return path[::-1]


@settings(max_examples=150, deadline=None)
@given(trees())
def test_a_tree_sees_its_ancestors(case: tuple[list[list[int]], list[int], int | None]) -> None:
    """Catches a sibling that is seen, an ancestor that is not, and distances measured along storage
    order."""
    parents, starts, window = case
    num_tokens = len(parents[0]) + 1
    depths, sees = tree_depths_and_ancestors(
        torch.tensor(parents, dtype=torch.int64).view(len(starts), num_tokens - 1)
    )
    mask = attention_mask(
        torch.tensor(starts), num_tokens, KEYS, torch.float32, window, depths, sees
    )
    assert mask.shape == (len(starts), 1, -(-num_tokens // QUERY_BLOCK) * QUERY_BLOCK, KEYS)
    for row, start in enumerate(starts):
        for token in range(num_tokens):
            path = path_to(parents[row], token)
            assert depths[row, token] == len(path) - 1
            positions = {column: column for column in range(start)} | {
                start + t: start + d for d, t in enumerate(path)
            }
            own = start + len(path) - 1
            seen = {
                column for column, at in positions.items() if window is None or at > own - window
            }
            assert set(mask[row, 0, token].isfinite().nonzero().flatten().tolist()) == seen
    assert (mask == 0).any(dim=-1).all(), "a query that sees nothing divides 0 by 0"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 17),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.none() | st.integers(1, 12),
)
def test_a_chain_is_the_tree_without_branches(
    num_tokens: int, starts: list[int], window: int | None
) -> None:
    """Catches the two ways of saying the same thing drifting apart."""
    parents = torch.arange(-1, num_tokens - 2).expand(len(starts), -1)
    chain = attention_mask(torch.tensor(starts), num_tokens, KEYS, torch.float32, window)
    tree = attention_mask(
        torch.tensor(starts),
        num_tokens,
        KEYS,
        torch.float32,
        window,
        *tree_depths_and_ancestors(parents),
    )
    assert torch.equal(chain[:, :, :num_tokens], tree[:, :, :num_tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masks_have_the_models_dtype(dtype: torch.dtype) -> None:
    """Catches a mask that attention would have to convert, or refuses."""
    assert attention_mask(torch.tensor([3]), 2, KEYS, dtype).dtype == dtype
