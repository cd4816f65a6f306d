"""The cache against a model a child could check: a list of numbers per row, under random histories.

Every position ever written gets a number of its own, so a lost, moved or overwritten position shows
up as a wrong number and not as a wrong shape.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from outrider.kv.cache import BLOCK, KVCache, LayerShape

LAYERS = (
    LayerShape(num_kv_heads=2, key_size=3, value_size=3), LayerShape(num_kv_heads=1, key_size=2, value_size=4),
    LayerShape(num_kv_heads=1, key_size=5, value_size=3, values_in_keys=True),
)  # fmt: skip


def make_cache(dtype: torch.dtype = torch.float64) -> KVCache:
    return KVCache(LAYERS, dtype, "cpu")


def write(cache: KVCache, row: int, numbers: list[float]) -> None:
    """What a pass does: put one number per position behind the row's committed ones, in every
    layer."""
    start = cache.lengths[row]
    cache.reserve(cache.num_rows, start + len(numbers))
    for layer, store in enumerate((*cache.keys, *cache.values)):
        values = torch.tensor(numbers, dtype=store.dtype) + layer / 16
        store[row, start : start + len(numbers)] = values[:, None, None].expand(
            -1, *store.shape[2:]
        )


def read(cache: KVCache, row: int) -> list[float]:
    """The committed numbers of a row; all layers, heads and channels must agree on them."""
    committed: list[Tensor] = []
    for layer, store in enumerate((*cache.keys, *cache.values)):
        committed.append(store[row, : cache.lengths[row]].flatten(1) - layer / 16)
    together = torch.cat(committed, dim=1)
    assert (together == together[:, :1]).all(), f"row {row}: layers disagree"
    return together[:, 0].tolist()


class CacheHistory(RuleBasedStateMachine):
    """Random additions, passes, roll-backs and departures, beside the lists they should amount to."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.rows: list[list[float]] = []
        self.written = 0

    def fresh(self, count: int) -> list[float]:
        self.written += count
        return [float(n) for n in range(self.written - count, self.written)]

    @rule()
    def add_row(self) -> None:
        assert self.cache.add_row() == len(self.rows)
        self.rows.append([])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 400))
    def prefill(self, data: st.DataObject, count: int) -> None:
        row = self.any_row(data)
        numbers = self.fresh(count)
        write(self.cache, row, numbers)
        kept = data.draw(st.integers(0, count))
        self.cache.advance(row, kept)
        self.rows[row] += numbers[:kept]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), path=st.sets(st.integers(0, 11)).map(sorted))
    def keep_path(self, data: st.DataObject, path: list[int]) -> None:
        row = self.any_row(data)
        numbers = self.fresh(12)
        write(self.cache, row, numbers)
        self.cache.keep(row, path)
        self.rows[row] += [numbers[offset] for offset in path]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), length=st.integers(0, 900))
    def truncate(self, data: st.DataObject, length: int) -> None:
        row = self.any_row(data)
        self.cache.truncate(row, length)
        self.rows[row] = self.rows[row][:length]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def swap_remove(self, data: st.DataObject) -> None:
        row = self.any_row(data)
        self.cache.swap_remove(row)
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    @rule(num_rows=st.integers(0, 6), num_tokens=st.integers(0, 3 * BLOCK))
    def reserve(self, num_rows: int, num_tokens: int) -> None:
        self.cache.reserve(num_rows, num_tokens)
        assert self.cache.num_slots >= num_rows
        assert self.cache.capacity >= num_tokens

    def any_row(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.rows) - 1))

    @invariant()
    def holds_what_was_committed(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_rows == len(self.rows)
        assert [read(self.cache, row) for row in range(len(self.rows))] == self.rows


TestCacheHistory = pytest.mark.slow(CacheHistory.TestCase)
TestCacheHistory.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheHistory.__doc__ = (
    "Catches positions lost by growth, by a departing neighbour, or by an overlapping move."
)


def test_overlapping_keep() -> None:
    """Catches a move in place that reads a node after overwriting it: the kept path is shifted by
    one onto itself."""
    cache = make_cache()
    cache.add_row()
    write(cache, 0, [float(n) for n in range(40)])
    cache.keep(0, list(range(1, 40)))
    assert read(cache, 0) == [float(n) for n in range(1, 40)]


def test_growth_keeps_contents_and_whole_blocks() -> None:
    """Catches a capacity that is no whole number of key blocks: then bits depend on how much room
    lies behind a row."""
    cache = make_cache()
    cache.add_row()
    write(cache, 0, [float(n) for n in range(BLOCK)])
    cache.advance(0, BLOCK)
    cache.reserve(3, BLOCK + 1)
    assert (cache.num_slots, cache.capacity) == (4, 2 * BLOCK)
    assert read(cache, 0) == [float(n) for n in range(BLOCK)]
    assert not cache.keys[0][0, BLOCK:].any(), "new room must hold zeros: 0 times NaN is NaN"


def test_rows_leave_after_growth_inside_a_pass() -> None:
    """Catches a cache grown under inference_mode that refuses every write outside it: the first row
    to finish crashed."""
    cache = make_cache()
    with torch.inference_mode():
        for row in range(2):
            cache.add_row()
            write(cache, row, [float(row)] * (BLOCK + 1))
            cache.advance(row, BLOCK + 1)
    cache.swap_remove(0)
    assert read(cache, 0) == [1.0] * (BLOCK + 1)


def test_scrub() -> None:
    """Catches NaN that stays where nobody looks: attention gives it weight 0, and 0 times NaN is
    NaN."""
    cache = make_cache()
    for row in range(3):
        cache.add_row()
        write(cache, row, [1.0, 2.0, float("nan")])
        cache.advance(row, 2)
    cache.swap_remove(0)
    cache.scrub()
    assert [read(cache, row) for row in range(2)] == [[1.0, 2.0]] * 2
    assert all(store.isfinite().all() for store in (*cache.keys, *cache.values))


def test_growth_is_geometric_then_bounded() -> None:
    """Catches a copy per token: growing to 64 blocks one position at a time must reallocate a
    handful of times."""
    cache = make_cache(torch.bfloat16)
    reallocations = 0
    for tokens in range(0, 64 * BLOCK, 64):
        before = cache.capacity
        cache.reserve(1, tokens)
        reallocations += cache.capacity != before
        assert cache.capacity <= max(BLOCK, tokens + 8 * BLOCK)
    assert reallocations <= 12


def test_bytes() -> None:
    """Catches a memory report that forgets values, layers, or the dtype."""
    cache = make_cache(torch.bfloat16)
    assert cache.bytes_per_token == 2 * (2 * (3 + 3) + 1 * (2 + 4) + 1 * 5)
    assert cache.allocated_bytes == sum(
        s.numel() * s.itemsize for s in (*cache.keys, *cache.values)
    )


def test_integrity_check_sees_damage() -> None:
    """Catches a check that never fails."""
    for damage in (
        lambda cache: cache.lengths.__setitem__(0, BLOCK + 1),
        lambda cache: cache.lengths.__setitem__(0, -1),
        lambda cache: cache.lengths.extend([0, 0]),
        lambda cache: cache.keys.__setitem__(1, cache.keys[1][:, :5]),
        lambda cache: cache.values.pop(),
    ):
        cache = make_cache()
        cache.add_row()
        damage(cache)
        with pytest.raises((AssertionError, ValueError)):
            cache.check_integrity()
