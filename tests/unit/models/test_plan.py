"""The short way to plan one text's chain, against the general way."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kv import KVCache
from outrider.kv.cache import LayerShape
from outrider.models.plan import plan_pass

CPU = torch.device("cpu")
LAST_POSITION = 300


def _cache(lengths: list[int]) -> KVCache:
    kv = KVCache((LayerShape(1, 4, 4),) * 2, torch.float32, CPU)
    for row, length in enumerate(lengths):
        kv.add_row()
        kv.reserve(row + 1, 600)
        kv.advance(row, length)
    return kv


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 310), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 17))
def test_one_text_is_planned_like_a_tree_without_branches(lengths: list[int], row: int, width: int) -> None:
    """Catches a wrong place, position or mask; texts that end beyond the model's last position (padding) included."""
    row %= len(lengths)
    kv = _cache(lengths)
    short, positions = plan_pass(kv, 1, width, None, row, last_position=LAST_POSITION)
    chain = torch.arange(-1, width - 2)[None]
    general, expected = plan_pass(kv, 1, width, chain, row, last_position=LAST_POSITION)
    assert torch.equal(positions, expected)
    assert positions.dtype == expected.dtype
    assert torch.equal(short.places, general.places)
    assert short.mask.shape == general.mask.shape
    assert short.mask.is_contiguous()
    assert torch.equal(short.mask[:, :, :width], general.mask[:, :, :width])
    assert (short.mask == 0).any(dim=-1).all(), "a query that sees nothing divides 0 by 0"
    assert short.window_mask is None
    assert all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in zip(short.keys, general.keys, strict=True))
