"""The waiting queue: smaller priority first, then first come, first served. A preempted request keeps its place."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What the queue must know of its members."""

    @property
    def rank(self) -> tuple[int, int]:
        """(priority, number of arrival): smaller runs first."""


Member = TypeVar("Member", bound=Queued)


class WaitingQueue(Generic[Member]):
    """A heap; members that were taken out by name are skipped when their turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Member]] = []
        self._alive: dict[tuple[int, int], Member] = {}

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._alive.values()))

    def push(self, member: Member) -> None:
        heapq.heappush(self._heap, (member.rank, member))
        self._alive[member.rank] = member

    def first(self) -> Member | None:
        """The request that is next; it stays in the queue."""
        while self._heap and self._alive.get(self._heap[0][0]) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, member: Member) -> None:
        self._alive.pop(member.rank, None)
