"""Pages of drafters' own keys and values for earlier texts, next to the target's (`kv/pages.py`).

Where a prompt shares a prefix with an earlier one, the target's keys come from the store without a
pass, but a draft model would read all of it. So the draft's keys are kept, too, for as many tokens
as the target's. The text alone finds them, because they depend on nothing else
(`Drafter.text_caches`). Their bits may come from another run: this may change a draft's
distribution by rounding, never the text of a lossless request.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.kv.cache import KVCache
from outrider.kv.pages import PagePool

PAGE = 32  # tokens
# of each cache, keys and values of the beginning of one text (`KVCache.read`)
Parts = list[list[Tensor]]


class DraftPages:
    """One pool for each of the drafters' caches; none where they have none. Lives in the engine's
    thread."""

    def __init__(self, caches: Sequence[KVCache], positions: int) -> None:
        self._pools = [
            PagePool(
                cache.layers, cache.dtype, cache.device, page=PAGE, num_pages=positions // PAGE
            )
            for cache in caches
        ]
        # whether rows lose the beginnings of their texts
        self.forget = any(cache.window is not None for cache in caches)

    def copy(self, tokens: Sequence[int]) -> Parts:
        """The stored keys and values for the beginning of a text."""
        return [pool.copy(tokens) for pool in self._pools]

    def save(self, tokens: Sequence[int], caches: Sequence[KVCache], index: int) -> None:
        """Keep what the row at `index` of all caches holds of `tokens`."""
        for pool, cache in zip(self._pools, caches, strict=True):
            pool.save(tokens, cache, index, cache.lengths[index])

    def clear(self) -> None:
        """Forget everything."""
        for pool in self._pools:
            pool.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError when a page is lost, or under two indices."""
        for pool in self._pools:
            pool.check_integrity()


def shortest(parts: Parts) -> int | None:
    """Tokens that every cache knows of a text; None where there are no caches."""
    return min((part[0].shape[0] for part in parts), default=None)
