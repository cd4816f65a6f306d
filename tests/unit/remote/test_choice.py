"""Which replica takes a request: prefixes stay together, nobody gets more than its share, and a change moves little."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider.engine.request import Update
from outrider.remote.coordinator.choice import BEGINNING, ReplicaLoad, beginning_of, choose, order
from outrider.remote.coordinator.tally import Tally, total
from outrider.stats import DecodeStats

NAMES = ["a:1", "b:1", "c:1", "d:1"]
FREE = dict.fromkeys(NAMES, ReplicaLoad(0, 4))


def test_one_beginning_goes_to_one_replica() -> None:
    """What differs behind it does not count."""
    system = list(range(BEGINNING))
    assert {choose(beginning_of([*system, end]), FREE) for end in range(50)} == {order(beginning_of(system), NAMES)[0]}


def test_beginnings_are_spread() -> None:
    """Each replica gets about its share of 400."""
    found = Counter(choose(beginning_of([number]), FREE) for number in range(400))
    assert set(found) == set(NAMES)
    assert min(found.values()) > 60


def test_a_replica_that_leaves_moves_only_its_own() -> None:
    """Everybody else keeps what it has read."""
    for number in range(100):
        beginning = beginning_of([number])
        before = choose(beginning, FREE)
        after = choose(beginning, {name: load for name, load in FREE.items() if name != "c:1"})
        assert after == before or before == "c:1"


@pytest.mark.parametrize("count", [4, 40, 400])
def test_nobody_gets_more_than_its_share(count: int) -> None:
    """One beginning for all requests: the bound spreads them."""
    loads = dict.fromkeys(NAMES, 0)
    for _ in range(count):
        loads[choose(b"same", {name: ReplicaLoad(load, 4) for name, load in loads.items()})] += 1
    assert max(loads.values()) <= 1.25 * count / 4 + 1


def test_large_replicas_take_more() -> None:
    """A share is by rows."""
    sizes = {"small": 2, "large": 8}
    loads = dict.fromkeys(sizes, 0)
    for number in range(200):
        loads[choose(beginning_of([number % 7]), {name: ReplicaLoad(loads[name], sizes[name]) for name in sizes})] += 1
    assert loads["large"] > 2.5 * loads["small"]


def test_a_crowded_replica_is_left() -> None:
    """A replica that is full of others' requests is skipped."""
    first = order(b"x", NAMES)[0]
    assert choose(b"x", {**FREE, first: ReplicaLoad(50, 4)}) != first


def test_steps_are_told_apart_by_origins() -> None:
    """The numbers of a lost replica, as the engine would have counted them."""
    tally, expected = Tally(), DecodeStats()
    for drafted, accepted, end in ((3, 2, "correction"), (3, 3, "bonus"), (0, 0, "plain"), (2, 0, "correction")):
        expected.count_step(drafted, accepted, accepted + 1, rejected=end == "correction")
        tally.add(Update(origins=["accepted"] * accepted + [end], token_ids=[1] * (accepted + 1), drafted=drafted))
    assert tally.stats.as_dict() == expected.as_dict()


def test_parts_add_up_to_one_answer() -> None:
    """The first part's first step is the answer's; times are the reader's."""
    parts = []
    for _ in range(2):
        one = DecodeStats()
        one.count_step(3, 2, 3, rejected=True)
        one.count_step(3, 1, 2, rejected=True)
        parts.append(one)
    whole = total([DecodeStats(), *parts], ttft_s=0.5, decode_s=2.0)
    assert (whole.answers, whole.first_tokens, whole.emitted, whole.steps, whole.drafted) == (1, 3, 10, 4, 12)
    assert (whole.ttft_s, whole.decode_s) == (0.5, 2.0)
