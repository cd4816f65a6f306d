"""The draft service's calls: Open compares protocol and vocabulary, Draft carries all rows of one
asker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from grpc import aio

from outrider.errors import CapabilityError
from outrider.remote.draft.counters import DraftCounters
from outrider.remote.draft.hosted import HostedDrafter
from outrider.remote.draft.texts import DraftLimits, HostedTexts
from outrider.remote.identity import check_protocol, check_vocabulary
from outrider.remote.protocol import PROTOCOL, fitting, messages
from outrider.version import __version__

MAX_UNSENT = 4096  # replies; an asker that reads more slowly is cut off
LOOK_S = 0.02  # between two looks whether a drain is over
LAST_WORDS_S = 1.0  # for calls that were asked to end


class OpenStream:
    """Made in the event loop; `send` may be called from any thread."""

    def __init__(self) -> None:
        self.is_slow = False  # the asker did not read what was sent
        self.is_garbled = False  # it sent bytes that are no message
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


log = logging.getLogger("outrider.service")
BREATH = 32  # rows of one message between which other calls have their turn


class DraftService:
    """A drafter as a gRPC service. Refuses with UNAVAILABLE until `serve`, and once it drains."""

    def __init__(self, counters: DraftCounters) -> None:
        self._counters = counters
        self._hosted: HostedDrafter | None = None
        self._limits: DraftLimits | None = None
        self._texts: HostedTexts | None = None
        self._streams: set[OpenStream] = set()
        self._why_not = "the model is being loaded"

    def serve(self, hosted: HostedDrafter, limits: DraftLimits, texts: HostedTexts) -> None:
        """Answer from now on."""
        self._hosted = hosted
        self._limits = limits
        self._texts = texts
        self._why_not = ""

    async def drain(self, timeout_s: float, why_not: str) -> None:
        """Take no new calls, answer what waits for a draft, and end the open ones: each knows its
        end when this returns, for whose line is closed before may never read it."""
        self._why_not = why_not
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._texts is not None and self._texts.num_unanswered():
                    await asyncio.sleep(LOOK_S)
        for stream in list(self._streams):
            stream.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while self._streams:
                    await asyncio.sleep(LOOK_S)

    async def Open(  # noqa: N802
        self, request: messages.Hello | None, context: aio.ServicerContext[Any, Any]
    ) -> messages.Welcome:
        """Compare protocol and vocabulary with the client's, and return what this service offers."""
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bytes that are no Hello")
        assert request is not None
        _, hosted, limits = await self._ready(context)
        try:
            check_protocol(request, "the asker")
            check_vocabulary(hosted.identity, request.model, "the asker")
        except CapabilityError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return messages.Welcome(
            protocol=PROTOCOL,
            release=__version__,
            model=hosted.identity,
            notes=hosted.notes,
            draft=messages.DraftTerms(
                max_draft_tokens=limits.max_draft_tokens, max_context=hosted.max_context
            ),
        )

    async def Draft(  # noqa: N802
        self,
        request_iterator: AsyncIterator[messages.DraftRequest | None],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[messages.DraftReply]:
        """Messages about rows in, drafts out, until either side ends it."""
        texts, _, limits = await self._ready(context)
        if len(self._streams) >= limits.max_instances:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{limits.max_instances} askers are connected: --limits max_instances",
            )
        stream = OpenStream()
        texts.connect(stream)
        self._streams.add(stream)
        context.add_done_callback(lambda ended: self._streams.discard(stream))
        self._counters.streams.inc()
        reading = asyncio.create_task(self._read(request_iterator, stream, texts))
        try:
            while (reply := await stream.next()) is not None:
                yield reply
            if stream.is_slow:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "replies are not read as fast as they are asked for",
                )
            if stream.is_garbled:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "bytes that are no DraftRequest"
                )
        finally:
            reading.cancel()
            self._counters.streams.dec()
            texts.disconnect(stream)

    async def _read(
        self,
        requests: AsyncIterator[messages.DraftRequest | None],
        stream: OpenStream,
        texts: HostedTexts,
    ) -> None:
        try:
            async for request in requests:
                if request is None:
                    stream.is_garbled = True
                    return
                for number, row in enumerate(request.rows, 1):
                    self._counters.requests.inc()
                    if (reply := texts.receive(stream, row)) is not None:
                        self._counters.trouble(reply.trouble)
                        stream.put([reply])
                    if not number % BREATH:
                        await asyncio.sleep(0)
        except (aio.AioRpcError, aio.UsageError) as error:
            log.info("a call of an asker broke off: %s", error)
        finally:
            stream.close()

    async def _ready(
        self, context: aio.ServicerContext[Any, Any]
    ) -> tuple[HostedTexts, HostedDrafter, DraftLimits]:
        if self._why_not:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._why_not)
        assert self._texts is not None
        assert self._hosted is not None
        assert self._limits is not None
        return self._texts, self._hosted, self._limits
