"""Server-sent events: `data: {json}` blocks, then `data: [DONE]`, as chat completions stream them;
or events with names.

The connection is watched while events are made: a client that leaves cancels the generator at once.
An error after the first byte cannot change the status any more; it becomes an event of its own.

A stream with `resume` in its request has marks, as comments, which clients skip:

    : resume {"id": ..., "created": ...}           first
    : resume {"choice": 0, "token_ids": [...]...}  after the events of every update

The reader of the marks sends them back, in `resume` of the same body, to a server of the same
model. That server brings its answers to where the marks end, writes nothing meanwhile, and
continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.engine.request import Request, Update
from outrider.errors import OutriderError
from outrider.serve.errors import ApiError, as_api_error
from outrider.serve.headers import current_id
from outrider.serve.schema.resumption import Mark, Resumption
from outrider.stats import DecodeStats
from outrider.wellformed import is_text

log = logging.getLogger("outrider.serve")
Result = TypeVar("Result")
MARK = ": resume "
WriteMark = Callable[[str], Awaitable[None]]
# for Python's splitlines, and so for httpx's iter_lines
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
# proxies must pass events on as they come
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Framing:
    """How an interface frames its events."""

    has_names: bool  # each is named by its `type`
    end: str | None  # what stands after the last one
    error: Callable[[ApiError], dict[str, Any]]


CHUNKS = Framing(has_names=False, end="[DONE]", error=ApiError.body)


class EventStream(Response):
    """A response made of the objects that an asynchronous generator yields."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        cancel: Callable[[], None],
        framing: Framing,
        marks: Marks | None = None,
    ) -> None:
        """`cancel` is called at the end in any case, also when the client left before the first
        chunk was asked for. `marks`: of a stream that another server can continue."""
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.init_headers(HEADERS)
        self._chunks = chunks
        self._cancel = cancel
        self._framing = framing
        self._marks = marks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await unless_gone(receive, self._send_all(send))
        except (ClientLeftError, OSError):
            return
        finally:
            self._cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async def event(chunk: dict[str, Any]) -> None:
            name = f"event: {chunk['type']}\n" if self._framing.has_names else ""
            await write(f"{name}data: {dumped(chunk)}\n\n")

        async def write(block: str) -> None:
            await send({"type": "http.response.body", "body": block.encode(), "more_body": True})

        try:
            if self._marks is not None:
                await self._marks.begin(write)
            async for chunk in self._chunks:
                if self._marks is None or not self._marks.is_silent:
                    await event(chunk)
        except OutriderError as error:
            await event(self._framing.error(as_api_error(error)))
        except OSError:  # the connection, in servers that say so
            raise
        except Exception:
            log.exception("a stream failed", extra=current_id())
            failure = ApiError(
                "the server failed while it answered; its log says more",
                status=500,
                kind="server_error",
            )
            await event(self._framing.error(failure))
        finally:
            await self._chunks.aclose()  # its own `finally` runs now, not some time
        if self._framing.end is not None:
            await write(f"data: {self._framing.end}\n\n")


def dumped(content: Any) -> str:
    """Compact JSON in one line; raises ValueError for what is no number, which no client could
    read. Half a surrogate pair, which a client's own metadata or tools may hold, is escaped as it
    was sent."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if text.isascii():
        return text
    return (
        text.translate(LINE_ENDS)
        if is_text(text)
        else json.dumps(content, separators=(",", ":"), allow_nan=False)
    )


class ClientLeftError(Exception):
    """The connection is closed: whatever is answered, nobody reads it."""


async def departure(receive: Receive) -> None:
    """Returns when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves first: then raises
    ClientLeftError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Marks:
    """The marks of one stream: those that it begins with, and those that it writes."""

    def __init__(
        self, resumption: Resumption | None, requests: Sequence[Request], identity: str
    ) -> None:
        """`identity`: of the answers, where the marks have none."""
        self._marks = [] if resumption is None else resumption.marks
        self._requests = requests
        self._is_wanted = resumption is not None
        given = Resumption.model_validate({}) if resumption is None else resumption
        self.id = given.id or identity
        self.created = int(time.time()) if given.created is None else given.created
        self._write: WriteMark | None = None
        # of the marks that it begins with
        self._stats = {number: DecodeStats() for number in range(len(requests))}
        # tokens of a step that is not complete yet
        self._accepted = dict.fromkeys(range(len(requests)), 0)
        self.is_silent = bool(self._marks)  # events repeat what the client has
        self.ended = frozenset(mark.choice for mark in self._marks if mark.ending is not None)

    async def begin(self, write: WriteMark) -> None:
        """Marks go to `write` from now on, where the request asked for them."""
        if self._is_wanted:
            self._write = write
            await self._mark({"id": self.id, "created": self.created})

    async def _mark(self, content: dict[str, Any]) -> None:
        if self._write is not None:
            await self._write(f"{MARK}{dumped(content)}\n\n")

    def replayed(self) -> Iterator[tuple[int, Update]]:
        """The updates that the first marks stand for. Their log-probabilities are placeholders:
        nobody reads them."""
        for mark in self._marks:
            self._count(mark)
            wanted = self._requests[mark.choice].params.logprobs is not None
            yield (
                mark.choice,
                replace(
                    mark.update(),
                    logprobs=[{token: 0.0} for token in mark.token_ids] if wanted else [],
                ),
            )
        self.is_silent = False

    async def passed(self, number: int, update: Update) -> None:
        """All events of this update were written: mark it."""
        if self._write is not None and not self.is_silent:
            await self._mark(Mark.of(number, update).model_dump(exclude_defaults=True))

    def whole(self, number: int, update: Update) -> Update:
        """An update whose end counts the steps of all servers that worked on the answer."""
        earlier = self._stats[number]
        if update.finish is None or not earlier.emitted:
            return update
        both = earlier.merge(update.finish.stats)
        stats = replace(both, answers=1, first_tokens=earlier.first_tokens)
        return replace(update, finish=replace(update.finish, stats=stats))

    def _count(self, mark: Mark) -> None:
        """Every step emits its accepted draft tokens and then one token of the target's."""
        if mark.choice in self.ended:
            return  # its end has the numbers
        stats = self._stats[mark.choice]
        for origin in mark.origins:
            if origin == "accepted":
                self._accepted[mark.choice] += 1
            else:
                accepted = self._accepted[mark.choice]
                stats.count_step(0, accepted, accepted + 1, rejected=origin == "correction")
                self._accepted[mark.choice] = 0
        stats.drafted += mark.drafted


def committed_of(resumption: Resumption | None, num_answers: int) -> list[list[int]]:
    """The tokens that each answer has. Raises ApiError for marks that no stream of this request can
    have."""
    committed: list[list[int]] = [[] for _ in range(num_answers)]
    ended = set()
    for number, mark in enumerate(resumption.marks if resumption is not None else ()):
        place = f"resume.marks.{number}"
        if mark.choice >= num_answers:
            raise ApiError(
                f"{place}.choice is {mark.choice}, and the request has {num_answers} answers",
                param=f"{place}.choice",
            )
        if mark.choice in ended:
            raise ApiError(f"{place} continues answer {mark.choice}, which has ended", param=place)
        sizes = [len(mark.token_ids), len(mark.origins), len(mark.pieces)]
        if len(set(sizes)) > 1:
            raise ApiError(
                f"{place} has {sizes[0]} token_ids, {sizes[1]} origins and {sizes[2]} pieces",
                param=place,
            )
        if mark.ending is not None:
            ended.add(mark.choice)
        committed[mark.choice] += mark.token_ids
    return committed
