"""From the engine's thread to the event loop: updates of several engine requests in one
asynchronous stream.

The engine calls listeners in its own thread and must not wait. `call_soon_threadsafe` hands every
update to the loop, in order; a request that is left before its end (client gone, another answer
failed) is cancelled, and what still arrives for it is dropped with the bridge. So is what waits for
a reader who holds it up, when that is too much (`backlog.py`): a row that waited with its reader
would keep its place and its memory from others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Protocol

from outrider.engine.request import Listener, Request, Update
from outrider.serve import request_ids
from outrider.serve.gate import MOST, Backlog, too_slow

log = logging.getLogger("outrider.serve")


class Submits(Protocol):
    """The part of an engine that is needed here."""

    def submit(self, request: Request, listener: Listener) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class Bridge:
    """The running requests of one HTTP request. Make it and use it in one event loop."""

    def __init__(self, engine: Submits) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._running: dict[int, str] = {}  # number -> request id
        self._backlog = Backlog()
        self._is_spilt = False
        self._about = request_ids.current()

    def submit(self, requests: Sequence[Request], *, ended: Collection[int] = ()) -> None:
        """All of them but those that have `ended`, or none: raises what the engine raises for the
        first it refuses, and cancels those before it."""
        for number, request in enumerate(requests):
            if number in ended:
                continue
            try:
                self._engine.submit(request, self._listener(number))
            except BaseException:
                self.cancel()
                raise
            self._running[number] = request.id

    def _listener(self, number: int) -> Listener:
        def listen(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._add, number, update)

        return listen

    def _add(self, number: int, update: Update) -> None:
        if self._is_spilt or number not in self._running:
            return
        self._updates.put_nowait((number, update))
        if not self._backlog.add(update):
            message = "an answer is ended: more than %d of its tokens and log-probabilities wait for their reader"
            log.warning(message, MOST, extra=self._about)
            self._is_spilt = True
            self._updates = asyncio.Queue()
            self.cancel()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(number of the request, update) until every request has finished. Raises ApiError for a
        reader who is too slow."""
        while self._running:
            self._backlog.ask()
            number, update = await self._updates.get()
            self._backlog.give(update)
            if number not in self._running:
                continue
            if update.finish is not None:
                del self._running[number]
            yield number, update
        if self._is_spilt:
            raise too_slow()

    def cancel(self) -> None:
        """End what still runs. Safe to call at any time, any number of times."""
        running = self._running
        self._running = {}
        for request_id in running.values():
            self._engine.cancel(request_id)
