"""The thread of all connections of a process, and objects that are closed after their last user.

The thread, with its event loop, lasts as long as the process: gRPC's own threads know it, and a
child that ends with the thread that started it must not end before.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, Generic, Protocol, TypeVar


class Closable(Protocol):
    """Something to be closed once."""

    def close(self) -> None: ...


Thing = TypeVar("Thing", bound=Closable)


class Shared(Generic[Thing]):
    """Things in use, by what they were made from."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._in_use: dict[Hashable, tuple[Thing, int]] = {}  # with the number of users

    def __len__(self) -> int:
        return len(self._in_use)

    def lease(self, key: Hashable, make: Callable[[], Thing]) -> Lease[Thing]:
        """The use of the thing for `key`, made where there is none. Raises what `make` raises."""
        with self._lock:
            thing, users = self._in_use.get(key) or (make(), 0)
            self._in_use[key] = thing, users + 1
        return Lease(thing, partial(self._release, key))

    def _release(self, key: Hashable) -> None:
        with self._lock:
            thing, users = self._in_use.pop(key)
            if users > 1:
                self._in_use[key] = thing, users - 1
            else:
                thing.close()


class Lease(Generic[Thing]):
    """The use of a shared thing, until `end` or until nobody holds the lease any more."""

    def __init__(self, thing: Thing, release: Callable[[], None]) -> None:
        self.thing = thing
        self._end = weakref.finalize(self, release)

    def end(self) -> None:
        """The thing is not needed here any more."""
        self._end()


Result = TypeVar("Result")


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The loop, running."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_report)
    threading.Thread(target=loop.run_forever, name="outrider-remote", daemon=True).start()
    return loop


def in_background(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Run `work` there; from any thread."""
    return asyncio.run_coroutine_threadsafe(work, background_loop())


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC wakes every loop of a process for each event, and all but the first find nothing to
    read."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
