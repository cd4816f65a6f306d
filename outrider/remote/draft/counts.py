"""What became of remote drafts, as numbers that only grow: for /metrics, and for a line behind an
answer."""

from __future__ import annotations

import threading
from collections import Counter

TROUBLES = "remote_draft_troubles"  # by reason: "remote_draft_troubles/unreachable"
NAMES = ("hits", "waits", "misses", "requests", "nodes", "wasted_nodes")


class RemoteCounts:
    """Counters of one connection. Any thread may add.

    hits: rows' steps with a draft at hand; waits: with one that was waited for; misses: without,
    though one was wanted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._troubles: Counter[str] = Counter()
        self._round_trips = 0
        self._round_trip_s = 0.0
        self._wait_s = 0.0

    def add(self, name: str, count: int = 1) -> None:
        """One of NAMES."""
        with self._lock:
            self._numbers[name] += count

    def trouble(self, reason: str) -> None:
        """Something went wrong on the wire, or was refused."""
        with self._lock:
            self._troubles[reason] += 1

    def round_trip(self, seconds: float) -> None:
        """Add the seconds from a request to the first nodes for it."""
        with self._lock:
            self._round_trips += 1
            self._round_trip_s += seconds

    def waited(self, seconds: float) -> None:
        """A step waited so long."""
        with self._lock:
            self._wait_s += seconds

    @property
    def troubles(self) -> dict[str, int]:
        """By reason."""
        with self._lock:
            return dict(self._troubles)

    def as_dict(self) -> dict[str, float]:
        """All of them, under the names that /metrics shows."""
        with self._lock:
            found: dict[str, float] = {
                f"remote_draft_{name}": self._numbers[name] for name in NAMES
            }
            found["remote_draft_round_trips"] = self._round_trips
            found["remote_draft_round_trip_seconds"] = self._round_trip_s
            found["remote_draft_wait_seconds"] = self._wait_s
            return found | {
                f"{TROUBLES}/{reason}": count for reason, count in sorted(self._troubles.items())
            }

    def summary(self) -> str:
        """One line for a person."""
        numbers = self.as_dict()
        troubles = self.troubles
        line = (
            f"draft service: {self._numbers['hits']} drafts at hand, {self._numbers['waits']} waited for, "
            f"{self._numbers['misses']} missed"
        )
        if self._round_trips:
            line += f"; a reply took {1e3 * numbers['remote_draft_round_trip_seconds'] / self._round_trips:.1f} ms"
        if troubles:
            line += f"; troubles: {', '.join(f'{reason} {count}' for reason, count in troubles.items())}"
        return line
