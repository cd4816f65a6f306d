"""One request on its way over targets. It keeps what the client has, and continues elsewhere when
its target is lost.

A stream of /v1/completions or /v1/chat/completions is asked for with marks
(outrider/serve/api/sse.py): events are passed on when the mark after them has come, so the
marks are what the client has. A whole answer is asked for again from its beginning, because its
client has nothing of it. Other streams can be lost once they have begun.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import httpx2
from pydantic import ValidationError
from starlette.types import Send

from outrider.remote.coordinator.fleet import Fleet
from outrider.remote.coordinator.settings import CoordinatorSettings
from outrider.remote.coordinator.target import DRAINING, AwayError, Call, Target, in_words, whole
from outrider.serve.api.sse import MARK, dumped
from outrider.serve.errors import SERVER, ApiError, unavailable
from outrider.serve.headers import ID_HEADER, current_id
from outrider.serve.schema.resumption import Mark
from outrider.wellformed import parsed_json

End = Callable[[], Awaitable[None]]
# what a target did to a request, by the name of the counter
Kind = Literal["unreachable", "cut", "stalled", "invalid", "failed", "refused"]
log = logging.getLogger("outrider.service")
RESUMED = ("/v1/completions", "/v1/chat/completions")
STORED = "/v1/responses"  # a target knows those that it stored itself
MAX_ANSWER = 256 << 20  # bytes of an answer that is not streamed
MAX_BLOCK = 16 << 20  # bytes of one event, and of those between two marks
OVERTIME_S = 5.0  # beyond a request's time limit, before a target that does not end it is left
FULL_BREAK_S = 1.0  # before full targets are asked again for a request that has begun
NOT_PASSED_ON = frozenset((
    "connection", "content-length", "date", "keep-alive", "proxy-authenticate", "proxy-authorization", "request-id", "server",
    "te", "trailer", "transfer-encoding", "upgrade", "x-request-id",
))  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A client's request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    fields: dict[str, Any] | None = field(init=False)  # of a JSON object

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", _object(self.body))

    @property
    def model(self) -> str | None:
        name = None if self.fields is None else self.fields.get("model")
        return name if isinstance(name, str) else None

    @property
    def is_resumable(self) -> bool:
        """Whether its answer is a stream that another target can continue."""
        fields = self.fields or {}
        return (
            self.path in RESUMED and fields.get("stream") is True and fields.get("resume") is None
        )


@dataclass(frozen=True)
class Answer:
    """A target's answer in one piece."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content: bytes

    @property
    def code(self) -> Any:
        """The code of an error."""
        error = (_object(self.content) or {}).get("error")
        return error.get("code") if isinstance(error, dict) else None


class RefusedError(Exception):
    """A target does not take the request at present."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class LostError(Exception):
    """A target will not finish this request. `answer`: what it says instead."""

    def __init__(self, kind: Kind, reason: str, answer: Answer | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.answer = answer

    @property
    def is_of_one_request(self) -> bool:
        """Whether the target continues with all others."""
        return self.kind in ("failed", "refused")


class Journey:
    """One request. `send`: of its ASGI connection."""

    def __init__(
        self, fleet: Fleet, settings: CoordinatorSettings, asked: Asked, send: Send
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._asked = asked
        self._send = send
        self._facts: Any = None  # of the target that began the answer
        self._head: dict[str, Any] | None = None
        self._marks: list[dict[str, Any]] = []
        self._has_begun = False  # the client has the first byte
        self._losses = 0  # targets that were lost, no token between
        # losses that may be the request's own doing: tokens do not make up for them
        self._faults = 0

    async def run(self) -> None:
        """To its end. Raises ApiError where the client has no byte yet."""
        self._fleet.in_flight += 1
        try:
            async with asyncio.timeout(self._settings.request_timeout_s + OVERTIME_S):
                await self._travel()
        except TimeoutError:
            seconds = self._settings.request_timeout_s
            await self._fail(
                ApiError(
                    f"nobody ended the answer within {seconds:g} s",
                    status=504,
                    kind=SERVER,
                    code="timeout",
                )
            )
        except ApiError as error:
            await self._fail(error)
        finally:
            self._fleet.in_flight -= 1

    async def _travel(self) -> None:
        avoided: set[Target] = set()
        refused: RefusedError | None = None
        waits_until = time.monotonic() + self._settings.wait_s
        while True:
            target = await self._fleet.choose(self._asked.model, self._facts, avoided, waits_until)
            if target is None:
                if refused is not None and await self._is_refused(refused, waits_until):
                    return
                avoided.clear()
                continue
            try:
                await self._ask(target)
                return
            except RefusedError as error:
                refused = error
                avoided.add(target)
                if error.answer.code == DRAINING:
                    target.is_leaving()
            except LostError as lost:
                await self._lose(target, lost)
                avoided.update([target] if lost.is_of_one_request else ())
                waits_until = time.monotonic() + self._settings.wait_s

    async def _is_refused(self, refused: RefusedError, waits_until: float) -> bool:
        """Whether a request that every target refuses ends so; else after a pause, in which one may
        have room again."""
        is_over = time.monotonic() > waits_until
        if not self._has_begun and (refused.answer.status != 503 or is_over):
            await self._send_whole(refused.answer)
            return True
        if is_over:
            raise unavailable("no target has room to continue the answer", "no_replica")
        await asyncio.sleep(FULL_BREAK_S)
        return False

    async def _lose(self, target: Target, lost: LostError) -> None:
        """Count it. Raises ApiError where it is not tried again."""
        target.failures[lost.kind] += 1
        if not lost.is_of_one_request:
            target.give_up(str(lost), lies=lost.kind == "invalid")
        may_be_ours = lost.is_of_one_request or lost.kind == "invalid"
        self._losses += not may_be_ours
        self._faults += may_be_ours
        about = {
            "reason": str(lost),
            "kind": lost.kind,
            "updates": len(self._marks),
            **current_id(),
        }
        log.warning("target %s lost a request", target.name, extra=about)
        is_torn = self._has_begun and not self._asked.is_resumable
        if is_torn or self._losses + self._faults > self._settings.max_retries:
            if lost.answer is not None and not self._has_begun:
                raise _AnsweredError(lost.answer)
            raise unavailable(f"the answer was lost with its target: {lost}", "target_lost")
        self._fleet.retries += 1

    async def _ask(self, target: Target) -> None:
        """One try, to the end. Raises LostError, or RefusedError."""
        asked = self._asked
        path = f"{asked.path}?{asked.query}" if asked.query else asked.path
        try:
            async with (
                target.watched() as call,
                target.request(asked.method, path, self._headers(), self._body()) as response,
            ):
                call.heard()
                end = await self._receive(target, response, call)
        except httpx2.ConnectError as error:
            raise LostError("unreachable", in_words(error)) from error
        except httpx2.HTTPError as error:
            raise LostError("cut", in_words(error)) from error
        except AwayError as error:
            raise LostError("invalid", str(error)) from error
        except TimeoutError as error:
            raise LostError("stalled", f"sent nothing for {self._settings.stall_s:g} s") from error
        await end()  # the target has done its part: a client that reads slowly is no fault of it

    def _headers(self) -> dict[str, str]:
        token = self._settings.access.token
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        left_out = {
            *NOT_PASSED_ON,
            "host",
            "accept-encoding",
            "expect",
            *(("authorization", "x-api-key") if token else ()),
        }
        passed = {
            name: value for name, value in self._asked.headers.items() if name not in left_out
        }
        return {**passed, **headers, ID_HEADER: current_id()["request_id"]}

    def _body(self) -> bytes:
        if not self._asked.is_resumable:
            return self._asked.body
        resume = (
            {} if self._head is None or not self._marks else {**self._head, "marks": self._marks}
        )
        return json.dumps({**(self._asked.fields or {}), "resume": resume}).encode()

    async def _receive(self, target: Target, response: httpx2.Response, call: Call) -> End:
        """Take the answer. Returns what sends the last of it to the client."""
        status = response.status_code
        is_stream = status == 200 and response.headers.get("content-type", "").startswith(
            "text/event-stream"
        )
        if is_stream and self._asked.is_resumable:
            self._facts = target.facts_of(self._asked.model) if self._facts is None else self._facts
            return await self._pass_marked(response, call)
        if is_stream:
            return await self._pass(response, call)
        answer = Answer(status, _headers_of(response), await whole(response, MAX_ANSWER))
        is_elsewhere = status == 404 and self._asked.path.startswith(STORED)
        if status in (429, 503) or is_elsewhere:
            raise RefusedError(answer)
        if status >= 500:
            raise LostError("failed", f"answers with {status}", answer)
        if self._marks:
            raise LostError("refused", f"does not continue the answer: status {status}")
        if status == 200 and self._asked.path in RESUMED and _object(answer.content) is None:
            raise LostError("invalid", "sends an answer that is no JSON object")
        return partial(self._send_whole, answer)

    async def _pass_marked(self, response: httpx2.Response, call: Call) -> End:
        """Pass events on as their marks come. Raises LostError where they end early or are none."""
        pending = bytearray()
        head = None
        async for block in blocks(response):
            call.heard()
            if block.startswith(MARK.encode()):
                mark = _object(block[len(MARK) :])
                if mark is None:
                    raise LostError("invalid", "sends a mark that is no JSON object")
                if head is None:
                    head = mark
                    self._head = self._head or mark
                    continue
                # first: what was cut off in the middle of a write was written
                self._marks.append(_checked(mark))
                self._losses = self._losses if not mark.get("token_ids") else 0
                await self._write(pending, response)
                pending.clear()
            elif block == b"data: [DONE]":
                return partial(self._end, response, bytes(pending + block + b"\n\n"))
            else:
                event = _object(block.removeprefix(b"data: "))
                if event is None or len(pending) > MAX_BLOCK:
                    raise LostError("invalid", "sends what is no event of a completion")
                if "error" in event:
                    answer = Answer(
                        500, [(b"content-type", b"application/json")], dumped(event).encode()
                    )
                    raise LostError("failed", "ends the answer with an error", answer)
                pending += block + b"\n\n"
        raise LostError("cut", "its stream ended before the answer")

    async def _pass(self, response: httpx2.Response, call: Call) -> End:
        async for part in response.aiter_raw():
            call.heard()
            await self._write(part, response)
        return partial(self._end, response)

    # ---------------------------------------------------------------- to the client

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, content: bytes | bytearray, response: httpx2.Response) -> None:
        if content:
            await self._start(response.status_code, _headers_of(response))
            await self._send(
                {"type": "http.response.body", "body": bytes(content), "more_body": True}
            )

    async def _end(self, response: httpx2.Response, content: bytes = b"") -> None:
        await self._start(response.status_code, _headers_of(response))
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def _send_whole(self, answer: Answer) -> None:
        headers = [*answer.headers, (b"content-length", str(len(answer.content)).encode())]
        await self._start(answer.status, headers)
        await self._send({"type": "http.response.body", "body": answer.content, "more_body": False})

    async def _fail(self, error: ApiError) -> None:
        """Tell the client, in the stream where that has begun."""
        if not self._has_begun and isinstance(error, _AnsweredError):
            await self._send_whole(error.answer)
            return
        if not self._has_begun:
            raise error
        if self._asked.is_resumable:
            event = f"data: {dumped(error.body())}\n\ndata: [DONE]\n\n"
        else:
            event = f"event: error\ndata: {dumped({'type': 'error', **error.body()})}\n\n"
        await self._send({"type": "http.response.body", "body": event.encode(), "more_body": False})


class _AnsweredError(ApiError):
    """An error that a target's answer tells better."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("the targets failed", status=answer.status, kind=SERVER)
        self.answer = answer


async def blocks(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Server-sent events without their blank lines. Raises LostError for one that does not end."""
    buffer = bytearray()
    async for part in response.aiter_raw():
        buffer += part
        while (end := buffer.find(b"\n\n")) >= 0:
            yield bytes(buffer[:end])
            del buffer[: end + 2]
        if len(buffer) > MAX_BLOCK:
            raise LostError("invalid", f"sends an event of more than {MAX_BLOCK} bytes")


def _checked(mark: dict[str, Any]) -> dict[str, Any]:
    try:
        Mark.model_validate(mark)
    except ValidationError as error:
        raise LostError("invalid", "sends a mark that no target could continue") from error
    return mark


def _object(content: bytes) -> dict[str, Any] | None:
    """A JSON object; None for everything else."""
    try:
        value = parsed_json(content.decode())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _headers_of(response: httpx2.Response) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower(), value)
        for name, value in response.headers.raw
        if name.decode("latin-1").lower() not in NOT_PASSED_ON
    ]
