"""Holds what other threads and the engine's thread share: live requests, commands, admission, and the heartbeat. All under
one lock.

Other threads put commands here; the engine's hears them between two turns, and is the only one that changes anything else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from outrider.engine.live import Live
from outrider.engine.pulse import Pulse

Command = Callable[[], None]


class Desk:
    """Any thread may call anything here."""

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.draining = self.stopping = False
        self.failed: str | None = None  # why the engine's thread died
        self.pulse = Pulse()
        self._alive: dict[str, Live] = {}  # by request id
        self._commands: deque[Command] = deque()

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Live]:
        """Iterates over the live requests; they may end meanwhile."""
        return iter(list(self._alive.values()))

    def __contains__(self, live: Live) -> bool:
        return self._alive.get(live.request.id) is live

    @property
    def is_closed(self) -> bool:
        return self.draining or self.stopping or self.failed is not None

    @property
    def has_commands(self) -> bool:
        """Whether somebody waits to be heard."""
        return bool(self._commands)

    def find(self, request_id: str) -> Live | None:
        """None: unknown, or over."""
        return self._alive.get(request_id)

    def enter(self, live: Live) -> None:
        """It lives from now on."""
        with self.lock:
            self._alive[live.request.id] = live

    def leave(self, live: Live) -> None:
        """It is over."""
        with self.lock:
            del self._alive[live.request.id]
            self.lock.notify_all()  # `drain` waits for this

    def do(self, command: Command) -> None:
        """In the engine's thread, soon."""
        with self.lock:
            self._commands.append(command)
            self.pulse.wake()
            self.lock.notify_all()

    def hear(self, *, wait: bool) -> deque[Command]:
        """What came in since the last time. `wait`: sleep until there is something, or the end."""
        with self.lock:
            if wait:
                self.pulse.rest()
                self.lock.wait_for(lambda: self._commands or self.stopping)
            self.pulse.beat()
            commands, self._commands = self._commands, deque()
        return commands

    def drain(self, timeout_s: float) -> bool:
        """Nothing new is taken; False when not all were over in time."""
        with self.lock:
            self.draining = True
            return self.lock.wait_for(lambda: not self._alive, timeout_s)

    def stop(self) -> None:
        """Nothing new is taken, and the engine's thread is to end."""
        with self.lock:
            self.stopping = True
            self.lock.notify_all()
