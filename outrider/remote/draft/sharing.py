"""What the drafters of a process share, a connection or a local service: made for the first one, closed after the last."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, Protocol, TypeVar


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
