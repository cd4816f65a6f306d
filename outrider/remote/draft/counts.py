"""What became of remote drafts, as numbers that only grow: for /metrics, and for a line after an
answer."""

from __future__ import annotations

import threading
from collections import Counter

TROUBLES = "troubles/"  # by reason
NAMES = ("hits", "waits", "misses", "requests", "nodes", "wasted_nodes")
TIMES = ("round_trips", "round_trip_seconds", "wait_seconds")


class RemoteCounts:
    """Counters of one connection. Any thread may add.

    hits: rows' steps with a draft at hand; waits: with one that was waited for; misses: without,
    though one was wanted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()

    def add(self, **counts: float) -> None:
        """Add to numbers, by their names in NAMES and TIMES."""
        with self._lock:
            self._numbers.update(counts)

    def trouble(self, reason: str) -> None:
        """Something went wrong on the wire, or was refused."""
        self.add(**{TROUBLES + reason: 1})

    @property
    def troubles(self) -> dict[str, int]:
        """By reason."""
        with self._lock:
            return {
                name.removeprefix(TROUBLES): count
                for name, count in sorted(self._numbers.items())
                if name.startswith(TROUBLES)
            }

    def as_dict(self) -> dict[str, float]:
        """All of them, under the names that /metrics shows."""
        with self._lock:
            numbers = {name: 0 for name in (*NAMES, *TIMES)} | dict(sorted(self._numbers.items()))
        return {f"remote_draft_{name}": count for name, count in numbers.items()}

    def summary(self) -> str:
        """One line for a person."""
        numbers = self._numbers
        line = (
            f"draft service: {numbers['hits']} drafts at hand, {numbers['waits']} waited for, "
            f"{numbers['misses']} missed"
        )
        if numbers["round_trips"]:
            each_ms = 1e3 * numbers["round_trip_seconds"] / numbers["round_trips"]
            line += f"; a reply took {each_ms:.1f} ms"
        if troubles := self.troubles:
            line += f"; troubles: {', '.join(f'{reason} {count}' for reason, count in troubles.items())}"
        return line
