"""From the engine's thread to the event loop: updates of several engine requests in one asynchronous stream.

The engine calls listeners in its own thread and must not wait. `call_soon_threadsafe` hands every update to the loop, in
order; a request that is left before its end (client gone, another answer failed) is cancelled, and what still arrives for
it is dropped with the bridge.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from outrider.engine.request import Listener, Request, Update


class Submits(Protocol):
    """The part of an engine that is needed here."""

    def submit(self, request: Request, listener: Listener) -> None: ...

    async def settle(self, request_id: str) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class Bridge:
    """The running requests of one HTTP request. Make it and use it in one event loop."""

    def __init__(self, engine: Submits) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._running: dict[int, str] = {}  # number -> request id

    def submit(self, requests: Sequence[Request]) -> None:
        """All of them, or none: raises what the engine raises for the first it refuses, and cancels those before it."""
        for number, request in enumerate(requests):
            try:
                self._engine.submit(request, self._listener(number))
            except BaseException:
                self.cancel()
                raise
            self._running[number] = request.id

    async def settle(self) -> None:
        """Wait until all are taken for good: engines that run elsewhere refuse later than `submit`. Raises the first refusal."""
        for request_id in list(self._running.values()):
            await self._engine.settle(request_id)

    def _listener(self, number: int) -> Listener:
        def listen(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._updates.put_nowait, (number, update))

        return listen

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(number of the request, update) until every request has finished."""
        while self._running:
            number, update = await self._updates.get()
            if number not in self._running:
                continue
            if update.finish is not None:
                del self._running[number]
            yield number, update

    def cancel(self) -> None:
        """End what still runs. Safe to call at any time, any number of times."""
        running, self._running = self._running, {}
        for request_id in running.values():
            self._engine.cancel(request_id)
