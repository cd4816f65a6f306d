"""Stop strings in a text that grows: where the first one begins, and which text could still become
one.

A stop string may end inside a token and start several tokens earlier: text that could still become
one is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in a growing text and holds back what could still become one."""

    def __init__(self, stops: Sequence[str], *, after: int = 0, include: bool = False) -> None:
        """Stop strings that begin in the first `after` pieces of the text do not count. `include`:
        the one that is found is shown."""
        self._stops = [stop for stop in stops if stop]
        self._ignored = after
        self._include = include
        self._held = ""
        self.match: str | None = None  # the stop string that was found

    @property
    def found(self) -> bool:
        """Whether a stop string was found."""
        return self.match is not None

    def push(self, text: str, token: int | None = None) -> str:
        """Text that is safe to show. After a stop string is found, `match` names it and nothing
        more comes out. Which `token` added the text matters where some of it is not looked at
        (`thoughts.py`)."""
        if self.found:
            return ""
        if self._ignored > 0:
            self.skip()
            return text
        self._held += text
        hits = [(at, at + len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            begin, end = min(hits)
            self.match = self._held[begin:end]
            safe = self._held[: end if self._include else begin]
            self._held = ""
            return safe
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe = self._held[:cut]
        self._held = self._held[cut:]
        return safe

    def skip(self) -> None:
        """One piece of those that do not count has passed."""
        self._ignored = max(0, self._ignored - 1)

    def flush(self) -> str:
        """The held-back text, once it is certain that no more will come."""
        held = self._held
        self._held = ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
