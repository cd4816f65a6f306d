"""Memory for keys and values: who may join, and who must go when texts grow.

A cache is (slots x positions per slot), the same length for all, and grows in steps; so what a row costs depends on its
neighbours. All questions are answered by asking the cache what it would become.
"""

from __future__ import annotations

from outrider.errors import ConfigError
from outrider.kv.cache import BLOCK, KVCache

LEAST = 2 * BLOCK  # positions: of one request, while its prompt is read and while it is answered


class Room:
    """`positions`: how many there is memory for, in the batch and in prompts being read together. Raises ConfigError where not
    even one request would fit: it would wait for ever."""

    def __init__(self, positions: int, batch: KVCache, prompts: KVCache) -> None:
        if positions < LEAST:
            raise ConfigError(
                f"kv_memory is too small: beside kept prefixes it holds {positions} tokens, and one request takes {LEAST}; "
                "raise kv_memory, or lower prefix_share"
            )
        self.positions = positions
        self._batch, self._prompts = batch, prompts

    @property
    def longest(self) -> int:
        """Tokens that a row alone may grow to: once while its prompt is read, once in the batch."""
        return max(self.positions // 2 // BLOCK * BLOCK, BLOCK)

    def has_row(self, length: int, reading: int) -> bool:
        """Whether one more row fits into the batch beside those that are being read.

        `length`: its tokens; `reading`: tokens of its prompt that are read beside theirs (0: nothing to read). Gives memory
        back where caches are larger than they need to be.
        """
        return self._fits(self._batch.num_rows + self._prompts.num_rows + 1, length, 1 if reading else 0, reading)

    def can_grow(self, length: int) -> bool:
        """Whether the batch's rows may be `length` long; gives memory back like `has_row`."""
        return self._fits(self._batch.num_rows, length, 0, 0)

    def _fits(self, rows: int, length: int, more_prompts: int, reading: int) -> bool:
        prompts = self._prompts.num_rows + more_prompts
        if self._total(self._batch.size_for(rows, length), self._prompts.size_for(prompts, reading)) <= self.positions:
            return True
        tight = _tight(self._batch, rows, length), _tight(self._prompts, prompts, reading)
        if self._total(*tight) > self.positions:
            return False
        for cache, (slots, capacity) in zip((self._batch, self._prompts), tight, strict=True):
            cache.shrink(min(cache.num_slots, slots), min(cache.capacity, capacity))
        return True

    def _total(self, batch: tuple[int, int], prompts: tuple[int, int]) -> int:
        return batch[0] * batch[1] + prompts[0] * prompts[1]


def _tight(cache: KVCache, rows: int, length: int) -> tuple[int, int]:
    """The smallest size that holds so many rows, the present ones and one of `length`."""
    longest = max([length, BLOCK, *cache.lengths])
    slots = 1
    while slots < max(rows, cache.num_rows):
        slots *= 2
    return slots, -(-longest // BLOCK) * BLOCK
