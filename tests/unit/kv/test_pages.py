"""Pages against the texts they hold: what comes out of the pool is what was put in, for these
tokens and no others."""

from __future__ import annotations

import random

import torch

from outrider.kv.cache import KVCache, LayerShape
from outrider.kv.pages import PagePool

LAYERS = (LayerShape(2, 3, 3), LayerShape(1, 2, 4), LayerShape(1, 5, 3, values_in_keys=True))
PAGE = 4


def cache_of(tokens: list[int]) -> KVCache:
    """A row whose keys and values are a function of everything before them, as in a model."""
    cache = KVCache(LAYERS, torch.float64, "cpu")
    cache.add_row()
    values = torch.tensor(
        [hash(tuple(tokens[: index + 1])) % 9973 for index in range(len(tokens))],
        dtype=torch.float64,
    )
    for store in (*cache.keys, *cache.values):
        store[0, : len(tokens)] = values[:, None, None]
    cache.advance(0, len(tokens))
    return cache


def loaded(pool: PagePool, tokens: list[int]) -> int:
    """How much of `tokens` the pool knows; what it gives must be what the model would have written."""
    cache = KVCache(LAYERS, torch.float64, "cpu")
    cache.add_row()
    count = pool.load(tokens, cache, 0)
    assert cache.lengths == [count]
    for mine, real in zip(cache.read(0, 0, count), cache_of(tokens).read(0, 0, count), strict=True):
        assert torch.equal(mine, real)
    return count


def pool_of(num_pages: int) -> PagePool:
    return PagePool(LAYERS, torch.float64, "cpu", page=PAGE, num_pages=num_pages)


def test_texts_share_what_they_begin_with() -> None:
    """Whole pages only; a text that differs in its first token shares nothing."""
    pool = pool_of(8)
    text = list(range(10))
    pool.save(text, cache_of(text), 0, 10)
    assert pool.used == 2
    assert loaded(pool, text) == 8
    assert loaded(pool, [*text[:7], 99, 99]) == 4
    assert loaded(pool, [99, *text]) == 0
    assert pool.known(text[:4]) == 4
    other = [*text[:4], 50, 51, 52, 53]
    pool.save(other, cache_of(other), 0, 8)
    assert pool.used == 3, "the first page is shared"
    assert (pool.queries, pool.hits) == (30, 12)


def test_only_committed_positions_are_kept() -> None:
    """A length short of a page's end keeps nothing of that page."""
    pool = pool_of(4)
    text = list(range(8))
    pool.save(text, cache_of(text), 0, 7)
    assert loaded(pool, text) == 4


def test_the_least_recently_used_leaf_goes_first() -> None:
    """A beginning outlives its continuations, and a text that is used stays."""
    pool = pool_of(3)
    first = [1, 2, 3, 4, 5, 6, 7, 8]
    second = [9, 9, 9, 9]
    pool.save(first, cache_of(first), 0, 8)
    pool.save(second, cache_of(second), 0, 4)
    assert loaded(pool, first[:4]) == 4  # the page of 5..8 is the oldest leaf now
    third = [7, 7, 7, 7]
    pool.save(third, cache_of(third), 0, 4)
    assert [loaded(pool, text) for text in (first, second, third)] == [4, 4, 4]


def test_a_text_that_grows_takes_the_pages_of_others() -> None:
    """Its beginning was kept longest ago: catches a full pool that then keeps nothing more of it."""
    pool = pool_of(3)
    text = list(range(8))
    other = [9] * 8
    pool.save(text, cache_of(text), 0, 4)
    pool.save(other, cache_of(other), 0, 8)
    pool.save(text, cache_of(text), 0, 8)
    assert [loaded(pool, text), loaded(pool, other)] == [8, 4]
    pool.check_integrity()


def test_a_text_longer_than_the_pool_keeps_its_beginning() -> None:
    """A text's own pages are not dropped to make room for its later ones."""
    pool = pool_of(2)
    text = list(range(20))
    pool.save(text, cache_of(text), 0, 20)
    assert loaded(pool, text) == 8
    pool.clear()
    assert loaded(pool, text) == 0
    pool.check_integrity()


def test_a_text_longer_than_the_pool_that_is_saved_by_chunks() -> None:
    """A text's own last page is the oldest leaf when its next chunk wants room: prompts are saved
    so."""
    pool = pool_of(2)
    text = list(range(20))
    for length in (4, 8, 12, 20):
        pool.save(text, cache_of(text), 0, length)
        pool.check_integrity()
    assert loaded(pool, text) == 8


def test_a_text_longer_than_the_pool_takes_the_room_of_others_first() -> None:
    """Another text that shares its first page loses the second one, which hangs below it."""
    pool = pool_of(4)
    text = list(range(20))
    others = [[9] * 4, [*text[:4], 50, 51, 52, 53]]
    for other in others:
        pool.save(other, cache_of(other), 0, len(other))
    for length in (8, 16, 20):
        pool.save(text, cache_of(text), 0, length)
        pool.check_integrity()
    assert [loaded(pool, each) for each in (text, *others)] == [16, 0, 4]


def test_a_shared_beginning_is_dropped_with_nobody_below_it() -> None:
    """Both continuations of a page go before it, the one used longest ago first."""
    pool = pool_of(3)
    begin = [1, 2, 3, 4]
    texts = [[*begin, 5, 5, 5, 5], [*begin, 6, 6, 6, 6]]
    for text in texts:
        pool.save(text, cache_of(text), 0, 8)
    known = []
    for number in range(3):
        new = [70 + number] * 4
        pool.save(new, cache_of(new), 0, 4)
        pool.check_integrity()
        known.append([pool.known(text) for text in texts])
    assert known == [[4, 8], [4, 4], [0, 0]]


def test_a_pool_without_pages_knows_nothing() -> None:
    """An operator may set the pool to no pages."""
    pool = pool_of(0)
    pool.save([1, 2, 3, 4], cache_of([1, 2, 3, 4]), 0, 4)
    assert loaded(pool, [1, 2, 3, 4]) == 0


def test_random_histories() -> None:
    """Thousands of texts over few tokens, so that they share and evict one another all the time."""
    rng = random.Random(1)
    pool = pool_of(12)
    hits = 0
    for _ in range(1500):
        text = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        if rng.random() < 0.5:
            pool.save(text, cache_of(text), 0, len(text))
        else:
            hits += loaded(pool, text)
        pool.check_integrity()
    assert hits > 500


def test_a_copy_is_what_load_fills_in() -> None:
    """A copy serves caches whose row does not exist yet; `load` stops at the given length."""
    pool = pool_of(8)
    text = list(range(14))
    pool.save(text, cache_of(text), 0, 14)
    parts = pool.copy([*text[:9], 99])
    for mine, real in zip(parts, cache_of(text).read(0, 0, 8), strict=True):
        assert torch.equal(mine, real)
    assert [part.shape[0] for part in pool.copy([99])] == [0] * 2 * len(LAYERS)
    cache = KVCache(LAYERS, torch.float64, "cpu")
    cache.add_row()
    assert pool.load(text, cache, 0, max_length=7) == 4
    pool.check_integrity()
