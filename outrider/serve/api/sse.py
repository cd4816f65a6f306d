"""Server-sent events: `data: {json}` blocks, then `data: [DONE]`, as chat completions stream them;
or events with names.

The connection is watched while events are made: a client that leaves cancels the generator at once.
An error after the first byte cannot change the status any more; it becomes an event of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.serve import request_ids
from outrider.serve.departure import ClientLeftError, unless_gone
from outrider.serve.errors import ApiError, as_api_error
from outrider.wellformed import is_text

log = logging.getLogger("outrider.serve")
# for Python's splitlines, and so for httpx's iter_lines
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
# proxies must pass events on as they come
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Framing:
    """How an interface frames its events."""

    has_names: bool  # each is named by its `type`
    end: str | None  # what stands behind the last one
    error: Callable[[ApiError], dict[str, Any]]


CHUNKS = Framing(has_names=False, end="[DONE]", error=ApiError.body)


class StreamMarks(Protocol):
    """What makes a stream one that another server can continue."""

    is_silent: bool  # chunks repeat what the client has

    async def begin(self, write: Callable[[str], Awaitable[None]]) -> None: ...


class EventStream(Response):
    """A response made of the objects that an asynchronous generator yields."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        cancel: Callable[[], None],
        framing: Framing,
        marks: StreamMarks | None = None,
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
            log.exception("a stream failed", extra=request_ids.current())
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
