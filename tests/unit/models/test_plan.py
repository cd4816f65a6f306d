"""The short ways to plan one text's chain, and trees, against the general way."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kv import KVCache
from outrider.kv.cache import LayerShape
from outrider.models.pass_plan import PassPlan
from outrider.models.plan import plan_pass

CPU = torch.device("cpu")
LAST_POSITION = 300
EVERYTHING = 10_000  # a window that hides nothing: such a pass is planned the general way


def _cache(lengths: list[int]) -> KVCache:
    kv = KVCache((LayerShape(1, 4, 4),) * 2, torch.float32, CPU)
    for row, length in enumerate(lengths):
        kv.add_row()
        kv.reserve(row + 1, 600)
        kv.advance(row, length)
    return kv


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 310), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 17))
def test_one_text_is_planned_like_a_tree_without_branches(
    lengths: list[int], row: int, width: int
) -> None:
    """Catches a wrong slot, position or mask; texts that end beyond the model's last position
    (padding) included."""
    row %= len(lengths)
    kv = _cache(lengths)
    short = plan_pass(kv, 1, width, None, row, last_position=LAST_POSITION)
    chain = torch.arange(-1, width - 2)[None]
    _check(
        short,
        plan_pass(kv, 1, width, chain, row, last_position=LAST_POSITION, window=EVERYTHING),
        width,
    )


@st.composite
def _parents(draw: st.DrawFn) -> list[list[int]]:
    num_nodes = draw(st.integers(0, 17))
    num_rows = draw(st.integers(1, 3))
    line = st.tuples(*(st.integers(-1, node - 1) for node in range(num_nodes)))
    return [list(draw(line)) for _ in range(num_rows)]


@settings(max_examples=100, deadline=None)
@given(_parents(), st.lists(st.integers(0, 310), min_size=4, max_size=4), st.integers(0, 1))
def test_trees_are_planned_alike(
    parents: list[list[int]], lengths: list[int], first_row: int
) -> None:
    """Catches a sibling that is seen, a depth that is not a position, a row that takes its
    neighbour's slots."""
    kv = _cache(lengths)
    num_rows = len(parents)
    width = len(parents[0]) + 1
    trees = torch.tensor(parents, dtype=torch.int64).view(num_rows, width - 1)
    short, general = (
        plan_pass(kv, num_rows, width, trees, first_row, last_position=LAST_POSITION, window=window)
        for window in (None, EVERYTHING)
    )
    _check(short, general, width)


def _check(
    short: tuple[PassPlan, torch.Tensor], general: tuple[PassPlan, torch.Tensor], width: int
) -> None:
    (plan, positions) = short
    (expected, expected_positions) = general
    assert torch.equal(positions, expected_positions)
    assert positions.dtype == expected_positions.dtype
    assert torch.equal(plan.indices, expected.indices)
    assert plan.indices.dtype == expected.indices.dtype
    assert plan.mask.shape == expected.mask.shape
    assert plan.mask.dtype == expected.mask.dtype
    assert plan.mask.is_contiguous()
    assert torch.equal(plan.mask[:, :, :width], expected.mask[:, :, :width])
    assert (plan.mask == 0).any(dim=-1).all(), "a query that sees nothing divides 0 by 0"
    assert plan.window_mask is None
    assert all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape
        for a, b in zip(plan.keys, expected.keys, strict=True)
    )
