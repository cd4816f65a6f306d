"""Rows of states against the texts they saw: whatever is rejected or moved, a pass goes on from the
committed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kv.cache import LayerShape
from outrider.kv.state_pool import StatePool
from outrider.kv.state_slots import NUM_RECORDS, StateShape, StateSlots
from outrider.kv.states import MAX_SNAPSHOTS, SPACING, StateCache
from tests.simulated_cuda import SimulatedCuda


@dataclass
class Seen:
    """A state that remembers all it was fed, and whether it may still be changed."""

    tokens: list[int]
    is_snapshot: bool = False

    def copy(self) -> Seen:
        return Seen(list(self.tokens))

    def mark(self) -> Seen:
        return Seen(list(self.tokens), is_snapshot=True)

    def back_to(self, mark: Seen) -> Seen:
        assert mark.is_snapshot
        assert self.tokens[: len(mark.tokens)] == mark.tokens, "a snapshot of another text"
        return mark.copy()

    def first_broken_layer(self) -> int | None:
        return self.tokens.index(-1) if -1 in self.tokens else None


def new_cache() -> StateCache[Seen]:
    return StateCache([], torch.float32, "cpu")


def feed(cache: StateCache[Seen], row: int, new: list[int]) -> list[int]:
    """A pass, as `StateLM` makes it; returns what its state has then seen."""
    backlog = cache.backlog(row)
    state = cache.open(row) or Seen([])
    assert not state.is_snapshot, "a pass writes into a snapshot"
    state.tokens += backlog + new
    cache.close(row, state, backlog + new)
    return list(state.tokens)


Step = tuple[str, int, int, int]  # what, which row, two numbers
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["pass", "pass", "pass", "add", "remove", "move", "truncate", "scrub"]),
        st.integers(0, 3),
        st.integers(1, 9),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_every_pass_goes_on_from_what_is_committed(steps: list[Step]) -> None:
    """Catches a state that is stale, short of a token, shared between rows or left behind by a
    move."""
    cache = new_cache()
    texts = [list[int]()]
    fresh = iter(range(10**6))
    cache.add_row()
    for what, which, count, kept in steps:
        row = which % max(1, len(texts))
        if what == "add" or not texts:
            cache.add_row()
            texts.append([])
        elif what == "remove":
            cache.swap_remove(row)
            texts[row] = texts[-1]
            texts.pop()
        elif what == "move":  # a copy of the row stays
            packed = cache.pack(row)
            cache.unpack(cache.add_row(), packed)
            texts.append(list(texts[row]))
        elif what == "truncate":
            cache.truncate(row, max(0, len(texts[row]) - count))
            del texts[row][max(0, len(texts[row]) - count) :]
        elif what == "scrub":
            cache.scrub()
        else:
            new = [next(fresh) for _ in range(count)]
            assert feed(cache, row, new) == texts[row] + new
            cache.keep(row, range(min(kept, count)))
            texts[row] += new[: min(kept, count)]
        assert cache.lengths == [len(text) for text in texts]
        cache.check_integrity()


def test_snapshots_stay_few_and_reach_back() -> None:
    """A draft model goes back over several passes of one token: what is fed again must not be the
    whole text."""
    cache = new_cache()
    cache.add_row()
    for token in range(5 * SPACING):
        feed(cache, 0, [token])
        cache.advance(0, 1)
    cache.truncate(0, 5 * SPACING - 8)
    assert 0 < len(cache.backlog(0)) <= SPACING
    cache.check_integrity()
    assert len(cache._rows[0].snapshots) <= MAX_SNAPSHOTS


def test_more_than_was_fed_cannot_be_kept() -> None:
    cache = new_cache()
    cache.add_row()
    feed(cache, 0, [1, 2])
    with pytest.raises(AssertionError, match="more tokens are committed than the last pass had"):
        cache.keep(0, [0, 1, 2])


def test_the_first_broken_layer_of_any_row() -> None:
    cache = new_cache()
    for text in ([1, 2, -1], [5, -1], [7]):
        feed(cache, cache.add_row(), text)
    assert cache.first_broken_layer() == 1


# ---------------------------------------------------------------- texts seen before


def row_of(text: list[int]) -> StateCache[Seen]:
    cache = new_cache()
    feed(cache, cache.add_row(), text)
    cache.advance(0, len(text))
    return cache


def loaded(pool: StatePool, text: list[int]) -> int:
    """How much of a text the pool knows; the row goes on as one that was fed it."""
    cache = new_cache()
    cache.add_row()
    count = pool.load(text, cache, 0)
    assert cache.lengths == [count]
    assert feed(cache, 0, [99]) == [*text[:count], 99]
    return count


def test_a_state_serves_whole_beginnings_alone() -> None:
    pool = StatePool(page=4, num_pages=10**4)
    text = list(range(12))
    pool.save(text, row_of(text), 0, 12)
    assert loaded(pool, [*text, 5]) == 12
    assert loaded(pool, [*text, 6]) == 12, (
        "a state that was loaded is not changed by who goes on from it"
    )
    assert loaded(pool, text[:11]) == 0
    assert loaded(pool, [*text[:11], 50, 51]) == 0
    assert pool.known([*text, 5]) == 12
    assert (pool.queries, pool.hits) == (13 + 13 + 11 + 13, 24)
    pool.check_integrity()


def test_only_boundaries_that_are_committed_are_kept() -> None:
    pool = StatePool(page=4, num_pages=10**4)
    text = list(range(11))
    pool.save(text, row_of(text), 0, 11)
    assert loaded(pool, text) == 0, "11 is no multiple of a page"
    pool.save(text, row_of(text[:8]), 0, 7)
    assert loaded(pool, text) == 0, "7 of its tokens may be shared"
    pool.save(text, row_of(text[:8]), 0, 8)
    assert loaded(pool, text) == 8


def test_a_long_prompt_leaves_few_states() -> None:
    """Boundaries within a prompt stay only if they are powers of two."""
    pool = StatePool(page=4, num_pages=10**4)
    text = list(range(40))
    for end in range(4, 41, 4):
        pool.save(text, row_of(text[:end]), 0, end)
    assert [loaded(pool, text[:end]) for end in (7, 15, 31, 36, 40)] == [4, 8, 16, 32, 40]
    assert loaded(pool, text[:39]) == 32


def test_the_least_recently_used_state_goes_first() -> None:
    pool = StatePool(page=4, num_pages=2 * 512 // 4)  # room for two states
    texts = [[100 * n + k for k in range(4)] for n in range(3)]
    for text in texts[:2]:
        pool.save(text, row_of(text), 0, 4)
    loaded(pool, texts[0])
    pool.save(texts[2], row_of(texts[2]), 0, 4)
    assert [loaded(pool, text) for text in texts] == [4, 0, 4]
    pool.check_integrity()
    nothing = StatePool(page=4, num_pages=0)
    nothing.save(texts[0], row_of(texts[0]), 0, 4)
    assert loaded(nothing, texts[0]) == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_records_of_a_kept_path_move_together(device: str) -> None:
    """Catches records that stay among those of the tree, that another row's overwrite, or that wrap
    around wrongly."""
    with SimulatedCuda(), torch.inference_mode():
        slots = StateSlots(
            [LayerShape(1, 2, 2)], [StateShape(4, 8), StateShape(6, 4)], torch.float32, device
        )
        for _ in range(2):
            slots.add_row()
        # the tree's records go on at the beginning of the slot
        for committed in (0, NUM_RECORDS - 2):
            for chunk in [committed // 2] * 2 if committed else []:
                slots.begin(1, 1, chunk, reads=True)
                slots.advance(1, chunk)
            slots.begin(1, 1, 6, reads=False, in_tree=True)
            assert slots.num_records == NUM_RECORDS
            lines = [(committed + node) % NUM_RECORDS for node in range(6)]
            for store in slots.records:
                store.zero_()
                for node, line in enumerate(lines):
                    store[1, line] = node + 1
            slots.keep(1, [0, 2, 5])
            for store in slots.records:
                assert [int(store[1, line, -1]) for line in lines[:3]] == [1, 3, 6]
                assert not store[0].any()
            slots.truncate(1, 0)
