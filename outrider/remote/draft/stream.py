"""One open call of an asker: replies on their way from the computing thread to the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from outrider.remote.protocol import fitting, messages

MAX_UNSENT = 4096  # replies; an asker that reads more slowly is cut off


class OpenStream:
    """Made in the event loop; `send` may be called from any thread."""

    def __init__(self, instance: str, headers: Mapping[str, str]) -> None:
        self.instance, self.headers = instance, headers
        self.is_slow = False  # the asker did not read what was sent
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._unsent: list[messages.RowReply] = []
        self._is_closed = False

    def send(self, replies: list[messages.RowReply]) -> None:
        """Send when the wire is free. After the event loop's end, nothing."""
        try:
            self._loop.call_soon_threadsafe(self.put, replies)
        except RuntimeError:  # the loop is closed: nobody listens any more
            return

    def put(self, replies: list[messages.RowReply]) -> None:
        """`send` from within the event loop."""
        if self._is_closed:
            return
        self._unsent += replies
        if len(self._unsent) > MAX_UNSENT:
            self.is_slow = True
            self.close()
        self._news.set()

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True
        self._news.set()

    async def next(self) -> messages.DraftReply | None:
        """All that is to be sent by now, as far as one message holds it; None at the end."""
        await self._news.wait()
        self._news.clear()
        if self.is_slow or (self._is_closed and not self._unsent):
            return None
        replies = next(fitting(self._unsent), [])
        del self._unsent[: len(replies)]
        if self._unsent or self._is_closed:
            self._news.set()  # for the rest, and for the end
        return messages.DraftReply(rows=replies)
