"""Updates of one request on their way to a reader, who may be slow: the engine never waits, and what waits is joined.

What is kept is one update, which grows by the tokens of one answer at most.
"""

from __future__ import annotations

import asyncio
import contextlib

from outrider.engine.request import Update
from outrider.remote.target.replies import joined


class Outbox:
    """Made and read in one event loop; `put` is the engine's listener and may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._pending: Update | None = None

    def put(self, update: Update) -> None:
        """Hand an update over."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._add, update)

    async def take(self) -> Update:
        """All that came since the last time, as one update; waits while there is nothing."""
        await self._filled.wait()
        self._filled.clear()
        update, self._pending = self._pending, None
        assert update is not None
        return update

    def _add(self, update: Update) -> None:
        self._pending = update if self._pending is None else joined(self._pending, update)
        self._filled.set()
