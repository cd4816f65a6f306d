"""Layers with windows beside layers without: under random histories they hold the last positions,
and no more memory than these.

The cache is compared with lists, as in `test_cache.py`; pages with what a model would have written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.kv.cache import BLOCK, KEPT_BACK, KVCache, LayerShape
from outrider.kv.pages import PagePool
from outrider.kv.view import KVView
from outrider.remote.draft.host import KVWindow

WINDOW = 100
PAGE = 32
ROOM = 2 * BLOCK  # of a slot in layers with windows: what is held, a block before it, and passes
WHOLE = LayerShape(2, 3, 3)
WINDOWED = LayerShape(1, 2, 4, window=WINDOW)
LAYERS = (WINDOWED, WHOLE, WINDOWED)


def make_cache(layers: tuple[LayerShape, ...] = LAYERS) -> KVCache:
    return KVCache(layers, torch.float64, "cpu")


def put_in(cache: KVCache, row: int, numbers: list[float]) -> None:
    """What a pass does: one number per position behind the committed ones, in every layer."""
    start = cache.lengths[row]
    count = len(numbers)
    cache.reserve(cache.num_rows, start + count)
    cache.make_room(row, 1, count)
    for store, begin in zip((*cache.keys, *cache.values), cache.begins(row), strict=True):
        store[row, start - begin : start - begin + count] = torch.tensor(
            numbers, dtype=store.dtype
        )[:, None, None]


def parts_of(numbers: list[float]) -> list[torch.Tensor]:
    """What `KVCache.read` gives for positions that hold these numbers."""
    sizes = [(s.num_kv_heads, s.key_size) for s in LAYERS] + [
        (s.num_kv_heads, s.value_size) for s in LAYERS
    ]
    column = torch.tensor(numbers, dtype=torch.float64)[:, None, None]
    return [column.expand(-1, *size) for size in sizes]


def held(cache: KVCache, row: int, layer: int) -> list[float]:
    """The committed numbers of a row that a layer holds; keys and values agree."""
    first = 0 if cache.layers[layer].window is None else cache.firsts[row]
    found = []
    for number, store in enumerate((*cache.keys, *cache.values)):
        if number % len(cache.layers) == layer:
            begin = cache.begins(row)[number]
            found.append(store[row, first - begin : cache.lengths[row] - begin].flatten(1))
    together = torch.cat(found, dim=1)
    assert (together == together[:, :1]).all()
    return together[:, 0].tolist()


class WindowHistory(RuleBasedStateMachine):
    """Random passes, roll-backs, moves and departures, beside the lists they amount to."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.rows: list[list[float]] = []
        self.longest: list[int] = []  # that a row has been
        self.written = 0

    def fresh(self, count: int) -> list[float]:
        self.written += count
        return [float(n) for n in range(self.written - count, self.written)]

    def any_row(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.rows) - 1))

    @rule()
    def add_row(self) -> None:
        self.cache.add_row()
        self.rows.append([])
        self.longest.append(0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 700), rejected=st.integers(0, 80))
    def make_pass(self, data: st.DataObject, count: int, rejected: int) -> None:
        row = self.any_row(data)
        numbers = self.fresh(count)
        put_in(self.cache, row, numbers)
        kept = max(0, count - rejected)
        self.cache.advance(row, kept)
        self.rows[row] += numbers[:kept]
        self.longest[row] = max(self.longest[row], len(self.rows[row]))

    @rule(count=st.integers(1, 1500))
    def load_row(self, count: int) -> None:
        """A new row gets what another cache has read: it holds less than its slot from its base on."""
        numbers = self.fresh(count)
        self.cache.put(self.cache.add_row(), 0, parts_of(numbers))
        self.rows.append(numbers)
        self.longest.append(count)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), path=st.sets(st.integers(0, 11)).map(sorted))
    def keep_path(self, data: st.DataObject, path: list[int]) -> None:
        row = self.any_row(data)
        numbers = self.fresh(12)
        put_in(self.cache, row, numbers)
        self.cache.keep(row, path)
        self.rows[row] += [numbers[offset] for offset in path]
        self.longest[row] = max(self.longest[row], len(self.rows[row]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.one_of(st.integers(0, KEPT_BACK), st.integers(0, 3000)))
    def take_back(self, data: st.DataObject, count: int) -> None:
        row = self.any_row(data)
        length = max(0, len(self.rows[row]) - count)
        self.cache.truncate(row, length)
        if length >= self.longest[row] - KEPT_BACK:
            assert self.cache.lengths[row] == length, "so many may be taken back"
        assert self.cache.lengths[row] in (0, length)
        self.rows[row] = self.rows[row][: self.cache.lengths[row]]
        if not self.rows[row]:
            self.longest[row] = 0

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def swap_remove(self, data: st.DataObject) -> None:
        row = self.any_row(data)
        self.cache.swap_remove(row)
        for each in (self.rows, self.longest):
            last = each.pop()
            if row < len(each):
                each[row] = last

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def move_elsewhere(self, data: st.DataObject) -> None:
        """The copy takes the row's slot, so that nothing has changed."""
        row = self.any_row(data)
        packed = self.cache.pack(row)
        self.cache.unpack(self.cache.add_row(), packed)
        self.cache.swap_remove(row)

    @rule()
    def give_memory_back(self) -> None:
        longest = -(-max([1, *self.cache.lengths]) // BLOCK) * BLOCK
        self.cache.shrink(self.cache.num_slots, longest)

    @invariant()
    def holds_what_windows_reach(self) -> None:
        self.cache.check_integrity()
        assert self.cache.lengths == [len(row) for row in self.rows]
        for row, numbers in enumerate(self.rows):
            assert held(self.cache, row, 1) == numbers
            reached = held(self.cache, row, 0)
            assert reached == numbers[len(numbers) - len(reached) :] == held(self.cache, row, 2)
            assert len(reached) >= min(len(numbers), WINDOW)


TestWindowHistory = pytest.mark.slow(WindowHistory.TestCase)
TestWindowHistory.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWindowHistory.__doc__ = (
    "Catches positions lost or shifted where a row moves to the front of its slot."
)


def grown(length: int, cache: KVCache | None = None, first_chunk: int = 256) -> KVCache:
    """A cache whose row 0 was read in chunks up to this length; position p holds p."""
    cache = make_cache() if cache is None else cache
    if not cache.num_rows:
        cache.add_row()
    while cache.lengths[0] < length:
        start = cache.lengths[0]
        count = min(256 if start else first_chunk, length - start)
        put_in(cache, 0, [float(n) for n in range(start, start + count)])
        cache.advance(0, count)
    return cache


def test_memory_does_not_grow_beyond_the_window() -> None:
    """Catches layers with windows that keep whole texts, and a report of memory that does not say
    so."""
    cache = make_cache()
    sizes = []
    for length in (2 * BLOCK, 8 * BLOCK, 40 * BLOCK):
        grown(length, cache)
        stores = [*cache.keys, *cache.values]
        sizes.append(
            [
                sum(store.numel() for store in stores[layer :: len(LAYERS)])
                for layer in range(len(LAYERS))
            ]
        )
        assert cache.allocated_bytes == sum(store.numel() * store.itemsize for store in stores)
        assert cache.slot_bytes(cache.capacity) == cache.allocated_bytes
    assert [size[0] for size in sizes] == [size[2] for size in sizes] == [ROOM * (2 + 4)] * 3
    assert sizes[-1][1] > 10 * sizes[0][1]
    assert cache.bytes_per_token == 8 * (2 * (2 + 4) + 2 * (3 + 3)), (
        "of a token that all layers hold"
    )


def test_a_cache_without_whole_layers() -> None:
    """Every layer has a window: a text of any length takes the same memory."""
    cache = grown(30 * BLOCK, make_cache((WINDOWED,)))
    assert cache.allocated_bytes == ROOM * 6 * 8
    assert cache.capacity >= 30 * BLOCK, "as far as texts may go"
    assert held(cache, 0, 0)[-WINDOW:] == [float(n) for n in range(30 * BLOCK - WINDOW, 30 * BLOCK)]


@pytest.mark.parametrize("window", [192, 193, 256, 448])
def test_slots_have_room_for_chunks(window: int) -> None:
    """Catches slots that a prompt's chunk enlarges for good, because what is held lies badly in its
    blocks."""
    sizes = set()
    for start in range(1, BLOCK, 21):
        cache = make_cache((LayerShape(1, 1, 1, window=window),))
        cache.add_row()
        cache.reserve(1, 8 * BLOCK)
        room = cache.window_capacity
        grown(5 * BLOCK, cache, start)
        sizes |= {room, cache.window_capacity}
    assert sizes == {2 * BLOCK if window == 192 else 3 * BLOCK}


def test_sizes_of_slots() -> None:
    """They are what docs/decisions/024 says, in blocks."""
    windows = {16: 2, 128: 2, 448: 3, 512: 3, 1024: 4, 2048: 6, 4096: 10}
    for window, blocks in windows.items():
        cache = make_cache((LayerShape(1, 1, 1, window=window),))
        cache.reserve(1, 20 * BLOCK)
        assert cache.window_capacity == blocks * BLOCK


def test_a_pass_wider_than_a_slot() -> None:
    """It makes the slots longer; what a window reaches stays."""
    cache = grown(3 * BLOCK)
    put_in(cache, 0, [float(n) for n in range(3 * BLOCK, 9 * BLOCK)])
    cache.advance(0, 6 * BLOCK)
    cache.check_integrity()
    assert cache.window_capacity > 6 * BLOCK
    assert (
        held(cache, 0, 0)[-7 * BLOCK :]
        == [float(n) for n in range(9 * BLOCK)][-len(held(cache, 0, 0)) :]
    )


def test_what_was_cut_too_far_is_forgotten() -> None:
    """A row that is cut below what windows hold begins anew, instead of going on with a gap."""
    cache = grown(5 * BLOCK)
    cache.truncate(0, 5 * BLOCK - KEPT_BACK)
    assert cache.lengths == [5 * BLOCK - KEPT_BACK]
    cache.truncate(0, 2 * BLOCK)
    assert (cache.lengths, cache.bases, cache.firsts) == ([0], [0], [0])
    with pytest.raises(AssertionError, match="holds no positions before"):
        grown(5 * BLOCK).read(0, 0, 10)


LONG = [float(n) for n in range(5 * BLOCK + 300)]
# that layers with windows hold of a row that was loaded; its base is 5 * BLOCK
FIRST = len(LONG) - WINDOW - KEPT_BACK


def loaded_row(cache: KVCache) -> None:
    """Row 0 of an empty cache, from pages."""
    cache.put(cache.add_row(), 0, parts_of(LONG))
    assert cache.firsts[0] == FIRST > cache.bases[0] > 0


def test_a_packed_row_that_holds_less_than_its_slot() -> None:
    """Catches positions that only the other cache's base promises; and it may be unpacked again."""
    cache = make_cache()
    loaded_row(cache)
    packed = cache.pack(0)
    for other in (make_cache(), make_cache(), cache):
        row = other.add_row()
        other.unpack(row, packed)
        other.check_integrity()
        assert other.firsts[row] == FIRST
        assert held(other, row, 0) == held(other, row, 2) == LONG[FIRST:]
        assert held(other, row, 1) == LONG
    other.truncate(1, FIRST + WINDOW - 1)
    assert other.lengths == [len(LONG), 0], "what windows reach from there is gone"


def test_a_row_that_holds_less_than_its_slot_takes_the_place_of_another() -> None:
    """What it lacks it lacks there, too."""
    cache = make_cache()
    cache.add_row()
    cache.put(cache.add_row(), 0, parts_of(LONG))
    cache.swap_remove(0)
    assert (cache.firsts, held(cache, 0, 0)) == ([FIRST], LONG[FIRST:])
    cache.truncate(0, FIRST + WINDOW)
    assert held(cache, 0, 0) == LONG[FIRST : FIRST + WINDOW], "so far it may be cut"


def test_a_view_moves_its_parents_rows() -> None:
    """A draft that needs the room keeps what the parent's windows reach, and its own tokens, which
    lie behind that."""
    parent = grown(2 * BLOCK - 50)
    view = KVView(parent)
    view.add_row()
    put_in(view, 0, [-1.0] * 40)
    view.advance(0, 40)
    assert parent.bases == [0]
    put_in(view, 0, [-2.0] * 40)
    assert parent.bases == [BLOCK]
    view.check_integrity()
    assert view.slot_bytes(8 * BLOCK) == parent.slot_bytes(8 * BLOCK)
    assert held(view, 0, 0)[-40:] == [-1.0] * 40
    assert held(parent, 0, 0)[-WINDOW:] == [float(n) for n in range(2 * BLOCK - 50)][-WINDOW:]


def test_some_rows_move_alone() -> None:
    """Catches a row of a cache's part that moves where the part begins, not where it stands."""
    parent = grown(2 * BLOCK - 50)
    parent.unpack(parent.add_row(), parent.pack(0))
    part = KVWindow(parent, 1, 1)
    grown(3 * BLOCK, part)
    assert parent.bases == [0, BLOCK]
    assert part.slot_bytes(8 * BLOCK) == parent.slot_bytes(8 * BLOCK)
    assert held(part, 0, 0)[-WINDOW:] == [float(n) for n in range(3 * BLOCK)][-WINDOW:]
    assert held(parent, 0, 0)[-WINDOW:] == [float(n) for n in range(2 * BLOCK - 50)][-WINDOW:]


def test_a_long_draft_on_a_view_costs_its_parent_nothing() -> None:
    """Catches a parent that forgets what windows reach from its own last token, not from the
    draft's."""
    parent = grown(WINDOW + KEPT_BACK + BLOCK - 6)
    view = KVView(parent)
    view.add_row()
    put_in(view, 0, [-1.0] * (WINDOW + KEPT_BACK))
    view.advance(0, WINDOW + KEPT_BACK)
    put_in(view, 0, [-2.0] * BLOCK)
    assert parent.firsts == [0]
    assert held(view, 0, 0) == [*held(parent, 0, 0), *[-1.0] * (WINDOW + KEPT_BACK)]


def test_kept_nodes_are_found_once_for_all_layers() -> None:
    """Catches a small operation for every store, on a device where each costs a launch; `meta`
    stands for one."""

    class Differences(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten.sub.Tensor
            return func(*args, **(kwargs or {}))

    cache = KVCache(LAYERS, torch.float64, "meta")
    for length, expected in ((100, 0), (3 * BLOCK, 1)):
        grown(length, cache)
        with Differences() as seen:
            cache.keep(0, [0, 2])
        assert (seen.count, cache.bases[0] > 0) == (expected, expected > 0)


def test_nan_is_scrubbed() -> None:
    """Catches what is left behind a row that does not begin at its base."""
    cache = grown(3 * BLOCK)
    put_in(cache, 0, [float("nan")] * 9)
    cache.scrub()
    assert all(store.isfinite().all() for store in (*cache.keys, *cache.values))
    assert held(cache, 0, 0)[-1] == 3 * BLOCK - 1


# ---------------------------------------------------------------- pages


def pool() -> PagePool:
    return PagePool(LAYERS, torch.float64, "cpu", page=PAGE, num_pages=200)


TEXT = list(range(3000))


def loaded(pages: PagePool, tokens: list[int]) -> int:
    """How much of `tokens`, a beginning of `TEXT`, is known; what windows reach from there must be
    what was saved."""
    cache = make_cache()
    cache.add_row()
    count = pages.load(tokens, cache, 0)
    cache.check_integrity()
    assert cache.lengths == [count] == [pages.known(tokens)]
    assert held(cache, 0, 1) == TEXT[:count]
    reached = held(cache, 0, 0)
    assert reached == TEXT[count - len(reached) : count]
    assert len(reached) >= min(count, WINDOW)
    copied = make_cache()
    parts = pages.copy(tokens)
    copied.add_row()
    copied.put(0, 0, parts)
    assert held(copied, 0, 0)[-WINDOW:] == reached[-WINDOW:]
    return count


def test_a_prompt_saved_by_chunks_serves_at_every_page() -> None:
    pages = pool()
    cache = make_cache()
    for length in range(256, 3000, 256):
        grown(length, cache)
        pages.save(TEXT, cache, 0, length)
    for length in (31, 200, 1000, 2000, 2800):
        assert loaded(pages, TEXT[:length]) == length // PAGE * PAGE
    pages.check_integrity()


def test_a_row_saved_at_its_end_serves_there_alone() -> None:
    """Catches zeros that are taken for keys. What a later row holds fills the gap."""
    pages = pool()
    pages.save(TEXT, grown(3000), 0, 3000)
    assert loaded(pages, TEXT) == 2976
    assert loaded(pages, TEXT[:1500]) == 0
    # the first page that ends as many as are held
    enough = grown(3000).firsts[0] + (WINDOW + KEPT_BACK) // PAGE * PAGE + PAGE
    assert [loaded(pages, TEXT[:length]) for length in (enough - PAGE, enough)] == [0, enough]
    pages.save(TEXT, grown(1500), 0, 1500)
    assert loaded(pages, TEXT[:1500]) == 1472
    assert loaded(pages, TEXT[:2000]) == 1472
    assert loaded(pages, TEXT) == 2976
    pages.check_integrity()
