"""One connection for each service and asker of a process, however many drafters use it: the last one closes it."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from outrider.remote.draft.connection import Connection
from outrider.remote.endpoint import Endpoint
from outrider.remote.protocol import messages
from outrider.remote.security import ClientSecurity

Key = tuple[Endpoint, ClientSecurity, bytes]
_lock = threading.RLock()
_shared: dict[Key, tuple[Connection, int, str | None]] = {}  # with its users, and what was wrong at its start


class Lease:
    """The use of a shared connection, until `end` or until nobody holds the lease any more."""

    def __init__(
        self, endpoint: Endpoint, security: ClientSecurity, identity: messages.ModelIdentity, wait_s: float
    ) -> None:
        """Raises what `Connection.start` raises."""
        key = endpoint, security, identity.SerializeToString()
        with _lock:
            if key in _shared:
                self.connection, users, self.trouble = _shared[key]
                if self.connection.is_open:
                    self.trouble = None
            else:
                self.connection, users = Connection(endpoint, security, identity), 0
                self.trouble = self.connection.start(wait_s)
            _shared[key] = self.connection, users + 1, self.trouble
        self._end = weakref.finalize(self, _release, key)

    def end(self) -> None:
        """The connection is not needed here any more."""
        self._end()


def _release(key: Any) -> None:
    with _lock:
        connection, users, trouble = _shared.pop(key)
        if users > 1:
            _shared[key] = connection, users - 1, trouble
        else:
            connection.close()
