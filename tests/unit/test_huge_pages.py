"""Tensors on huge pages: right values, apart from one another, and kept as long as they are used."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch

from outrider.huge_pages import HugePageSpace, on_huge_pages, zeros_on_huge_pages


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_weights_moved_are_the_same(dtype: torch.dtype) -> None:
    """Also of odd sizes, and more than one block holds; neighbours must not overlap."""
    sizes = [(3, 5), (1000, 1001), (1,), (40, 1 << 20)]
    weights = [torch.randint(0, 100, size).to(dtype) for size in sizes]
    moved = [on_huge_pages(weight) for weight in weights]
    for weight, found in zip(weights, moved, strict=True):
        assert found.data_ptr() != weight.data_ptr()
        assert found.data_ptr() % 64 == 0
        assert torch.equal(found, weight)


def test_where_the_system_has_none_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(5)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert on_huge_pages(weight) is weight
    assert on_huge_pages(torch.zeros(0)).numel() == 0


def test_a_block_lives_as_long_as_its_weights() -> None:
    """Catches memory that is given back under a weight, or kept for ever behind the last one."""
    space = HugePageSpace()
    first = space.take(100)
    second = space.take(100)
    block = weakref.ref(space)
    first.fill_(1)
    second.fill_(2)
    del space, first
    assert block() is None
    assert bool((second == 2).all())


@pytest.mark.parametrize("columns", [3, 1 << 20])
def test_zeros_are_apart(columns: int) -> None:
    """Few bytes and many, an empty one between: each is zero, aligned and its own."""
    shapes = [(2, columns), (0, 7), (3, columns)]
    first, empty, last = zeros_on_huge_pages(shapes, torch.float32)
    assert [tuple(found.shape) for found in (first, empty, last)] == shapes
    assert not first.any()
    assert not last.any()
    first.fill_(1)
    assert not last.any()
    assert last.data_ptr() % 64 == 0
