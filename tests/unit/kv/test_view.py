"""A view of another cache: its own lengths, nobody else's memory."""

from __future__ import annotations

import pytest
import torch

from outrider.kv import KVCache, LayerShape
from outrider.kv.cache import BLOCK
from outrider.kv.view import KVView


@pytest.fixture
def parent() -> KVCache:
    cache = KVCache([LayerShape(1, 2, 2), LayerShape(1, 2, 3)], torch.float32, "cpu")
    for length in (3, 5, 8):
        cache.advance(cache.add_row(), length)
    return cache


def view_of(parent: KVCache) -> KVView:
    view = KVView(parent)
    for _ in parent.lengths:
        view.add_row()
    return view


def test_lengths_are_its_own_and_follow(parent: KVCache) -> None:
    """Catches a draft that commits to the target, or one that is not forgotten."""
    view = view_of(parent)
    view.advance(0, 4)
    view.advance(2, 1)
    assert (view.lengths, parent.lengths) == ([7, 5, 9], [3, 5, 8])
    view.check_integrity()
    parent.advance(1, 2)
    view.follow()
    assert view.lengths == parent.lengths == [3, 7, 8]
    view.advance(1, 1)
    assert parent.lengths == [3, 7, 8]


def test_growth_of_the_parent_is_seen_and_asked_for(parent: KVCache) -> None:
    """Catches a view that writes into the stores the parent has thrown away."""
    view = view_of(parent)
    view.reserve(3, BLOCK + 1)
    assert view.capacity == parent.capacity == 2 * BLOCK
    parent.reserve(9, 0)
    assert view.num_slots == parent.num_slots >= 9
    assert all(
        mine is theirs
        for mine, theirs in zip(
            (*view.keys, *view.values), (*parent.keys, *parent.values), strict=True
        )
    )
    assert view.allocated_bytes == 0


def test_rows_leave_without_moving_twice(parent: KVCache) -> None:
    """Catches the last row's contents being moved once by the parent and again by the view."""
    view = view_of(parent)
    for row in range(3):
        parent.keys[0][row] = row
    parent.swap_remove(0)
    view.swap_remove(0)
    view.check_integrity()
    assert view.lengths == [8, 5]
    assert parent.keys[0][0, :8].eq(2).all()
    assert parent.keys[0][2, :8].eq(2).all()


def test_scrub_keeps_what_is_committed(parent: KVCache) -> None:
    """Catches the view's own lengths, or its absent rows, deciding what is zeroed in the parent's
    memory."""
    view = KVView(parent)
    view.add_row()
    for store in parent.keys:
        store.fill_(1)
    view.advance(0, 2)
    view.scrub()
    assert [int(parent.keys[0][row, :, 0, 0].sum()) for row in range(3)] == [3, 5, 8]
    assert view.lengths == [3]


def test_integrity_is_checked(parent: KVCache) -> None:
    """Catches a check that cannot fail."""
    view = view_of(parent)
    view.truncate(1, 4)  # shorter than what is committed
    with pytest.raises(AssertionError, match="row 1: length 4"):
        view.check_integrity()
    view.follow()
    parent.add_row()
    with pytest.raises(AssertionError, match="3 rows on a cache of 4"):
        view.check_integrity()
