"""Addresses of a cache are kept between passes, and asked anew as soon as its tensors have moved."""

from __future__ import annotations

import torch

from outrider.kv import KVCache, LayerShape
from outrider.runtime.run import KeptAddresses


def test_a_cache_that_moved_is_asked_again() -> None:
    cache = KVCache([LayerShape(1, 4, 4)] * 3, torch.float32, torch.device("cpu"))
    kept = KeptAddresses()

    def agrees() -> bool:
        return list(kept(cache.keys)) == [store.data_ptr() for store in cache.keys]

    assert agrees()
    first = kept(cache.keys)
    assert kept(cache.keys) is first
    cache.reserve(4, 1000)  # makes other lists
    assert agrees()
    cache.shrink(2, 512)  # moves the tensors of the same lists
    assert agrees()
    assert list(kept([])) == []
