"""The state that other threads and the engine's thread share: active requests, commands, admission
and the heartbeat.

Other threads put commands here; the engine's takes them between two turns, and is the only one that
changes anything else. All of it is under one lock.

The heartbeat holds the time of the engine's last turn, so other threads can see whether it hangs. A
turn that takes long is no hang as long as its parts come to an end: the loop beats at every turn,
which reads one chunk of a prompt, and at every step of a batch that is made again row by row. While
there is nothing to do it rests; a new command wakes it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from outrider.engine.request import ActiveRequest


class Heartbeat:
    """Measures how long the engine's loop has not come round.

    `rest` and `wake` are called under the mailbox's lock.
    """

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


Command = Callable[[], None]


class Mailbox:
    """Any thread may call anything here."""

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.draining = self.stopping = False
        self.failed: str | None = None  # why the engine's thread died
        self.heartbeat = Heartbeat()
        self._alive: dict[str, ActiveRequest] = {}  # by request id
        self._commands: deque[Command] = deque()

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Iterates over the active requests; they may end meanwhile."""
        return iter(list(self._alive.values()))

    def __contains__(self, active: ActiveRequest) -> bool:
        return self._alive.get(active.request.id) is active

    @property
    def is_closed(self) -> bool:
        return self.draining or self.stopping or self.failed is not None

    def find(self, request_id: str) -> ActiveRequest | None:
        """None: unknown, or over."""
        return self._alive.get(request_id)

    def enter(self, active: ActiveRequest) -> None:
        """Add an active request."""
        with self.lock:
            self._alive[active.request.id] = active

    def leave(self, active: ActiveRequest) -> None:
        """Remove a request that is over."""
        with self.lock:
            del self._alive[active.request.id]
            self.lock.notify_all()  # `drain` waits for this

    def put(self, command: Command) -> None:
        """In the engine's thread, soon."""
        with self.lock:
            self._commands.append(command)
            self.heartbeat.wake()
            self.lock.notify_all()

    def receive(self, *, wait: bool) -> deque[Command]:
        """The commands that came in since the last call. `wait`: sleep until there is one, or the
        end."""
        with self.lock:
            if wait:
                self.heartbeat.rest()
                self.lock.wait_for(lambda: self._commands or self.stopping)
            self.heartbeat.beat()
            commands = self._commands
            self._commands = deque()
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
