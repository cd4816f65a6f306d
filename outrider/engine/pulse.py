"""When the engine's loop last came round, for whoever asks from another thread whether it hangs.

A turn that takes long is no hang as long as its parts come to an end: the loop beats at every turn, at every chunk of a prompt,
and at every step of a batch that is made again row by row. While there is nothing to do it rests; who brings work wakes it.
"""

from __future__ import annotations

import time


class Pulse:
    """`rest` and `wake` are called under the desk's lock."""

    def __init__(self) -> None:
        self._since: float | None = None  # monotonic seconds; None: nothing is to be done

    @property
    def age_s(self) -> float:
        """Seconds since the latest beat, or since work came to a loop that rested; 0: it rests."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def beat(self) -> None:
        """The loop comes round."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """The loop sleeps until there is work."""
        self._since = None

    def wake(self) -> None:
        """There is work: from now on a loop that rested is expected to come round."""
        if self._since is None:
            self.beat()
