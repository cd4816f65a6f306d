"""Asks one server, and tells what came and when. Nothing a server does raises here: a request ends as an Answer or a Failure.

httpx2 is the HTTP client because it is kept up (httpx has stood still since 0.28; Pydantic carries it on under this name),
because huggingface_hub brings it anyway, and because it reads server-sent events itself (httpx-sse is the same decoder for
the old library). A connection that cannot be opened is tried again, which no server can notice; anything later is not: a
request that was sent may have been counted.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from types import TracebackType
from typing import Any

import httpx2

from outrider.errors import OutriderError, RequestError, ServerError
from outrider.lab.server.options import ServerEndpoint
from outrider.lab.server.stream import BadStreamError, Stream, error_text, mended, one_line
from outrider.lab.server.types import Failure, FailureKind, MeasuredAnswer

CONNECT_S = 10.0
CONNECT_PAUSES_S = (0.2, 1.0)  # before the second and the third attempt
ERROR_BYTES = 65536  # of an error's body are read
NOT_THE_REQUEST = (401, 403, 408, 429)  # statuses of 4xx that say nothing against the request itself
HINTS = {
    401: "the server wants an API key: name the environment variable that holds it, --set api_key_env=NAME",
    403: "the API key does not open this",
    404: "is it an OpenAI-compatible server, and does it serve this model?",
    429: "the server limits requests: measure at a lower concurrency or rate",
    503: "the server is not ready or overloaded",
}


class Client:
    """One server's connections. Use as an async context manager."""

    def __init__(self, endpoint: ServerEndpoint, *, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._http = httpx2.AsyncClient(
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),  # the load decides how many
            headers={"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {},
            trust_env=not endpoint.is_local,  # proxies
        )
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def ask(self, request_id: str, path: str, body: dict[str, Any]) -> MeasuredAnswer | Failure:
        """POST, and read the stream to its end. Time starts with the attempt that found a connection."""
        for pause_s in CONNECT_PAUSES_S:
            outcome = await self._ask_once(request_id, path, body)
            if not (isinstance(outcome, Failure) and outcome.kind == "refused"):
                return outcome
            await asyncio.sleep(pause_s)
        return await self._ask_once(request_id, path, body)

    async def _ask_once(self, request_id: str, path: str, body: dict[str, Any]) -> MeasuredAnswer | Failure:
        stream = Stream()
        begin = perf_counter()
        try:
            async with self._http.stream("POST", self.endpoint.root + path, json=body) as response:
                await self._check(response)
                async for event in httpx2.EventSource(response):  # past the end mark too: the connection is used again
                    stream.feed(event.data, perf_counter() - begin, event.event)
        except (httpx2.HTTPError, BadStreamError, _StatusError) as error:
            if not stream.ended:
                return self._failure(request_id, error, stream)
        if not stream.is_whole:
            return self._failure(request_id, httpx2.RemoteProtocolError("the stream stopped before its end"), stream)
        return _answer(request_id, stream)

    async def get(self, path: str) -> httpx2.Response:
        """GET, whatever its status. Raises ServerError where no answer comes."""
        try:
            return await self._http.get(self.endpoint.root + path, follow_redirects=True)
        except httpx2.HTTPError as error:
            raise ServerError(self._failure("", error, Stream()).message) from error

    async def _check(self, response: httpx2.Response) -> None:
        """A stream of events, or _StatusError / BadStreamError with what the server says instead."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code == 200 and kind == "text/event-stream":
            return
        content = b""
        async for part in response.aiter_bytes():
            content += part
            if len(content) >= ERROR_BYTES:
                break
        text = _message_of(content[:ERROR_BYTES])
        if response.status_code == 200:
            raise BadStreamError(f"it answered {kind or 'data of no type'} instead of a stream of events: {text}")
        raise _StatusError(response.status_code, text)

    def _failure(self, request_id: str, error: Exception, stream: Stream) -> Failure:
        kind, words = _describe(error, self._timeout_s)
        message = one_line(self.endpoint.clean(f"{self.endpoint.root}: {words}"), 400)
        status = error.status if isinstance(error, _StatusError | BadStreamError) else None
        return Failure(id=request_id, kind=kind, message=message, status=status, num_chunks=len(stream.chunks_s))


class _StatusError(Exception):
    """Any HTTP status but 200."""

    def __init__(self, status: int, text: str) -> None:
        hint = f" ({HINTS[status]})" if status in HINTS else ""
        super().__init__(f"HTTP {status}: {text}{hint}")
        self.status = status


def raised(failure: Failure) -> OutriderError:
    """The error of a failure that ends the run: RequestError where the request is at fault, else ServerError."""
    status = failure.status or 500
    at_fault = 400 <= status < 500 and status not in NOT_THE_REQUEST
    return (RequestError if at_fault else ServerError)(failure.message)


def _answer(request_id: str, stream: Stream) -> MeasuredAnswer:
    return MeasuredAnswer(
        id=request_id,
        chunks_s=[round(time, 6) for time in stream.chunks_s],
        seconds=round(stream.seconds, 6),
        text=mended("".join(stream.texts)),
        finish_reason=stream.finish_reason,
        num_tokens=stream.num_tokens,
        num_prompt_tokens=stream.num_prompt_tokens,
        num_cached_tokens=stream.num_cached_tokens,
    )


def _describe(error: Exception, timeout_s: float) -> tuple[FailureKind, str]:
    """(kind, words for a person) of what went wrong."""
    reason = one_line(str(error)) or type(error).__name__
    match error:
        case BadStreamError():
            return ("aborted" if error.kind == "aborted" else "malformed"), reason
        case _StatusError():
            return "status", reason
        case httpx2.ConnectError() | httpx2.ConnectTimeout() | httpx2.ProxyError() | httpx2.UnsupportedProtocol():
            return "refused", f"no connection ({reason}); is the server running there?"
        case httpx2.TimeoutException():
            return "timeout", f"nothing came for {timeout_s:g} s"
        case httpx2.SSEError() | httpx2.DecodingError():
            return "malformed", reason
    return "dropped", f"the connection was dropped ({reason})"


def _message_of(content: bytes) -> str:
    """An error body in one line: the message in its JSON, or the text itself."""
    text = content.decode("utf-8", errors="replace")
    try:
        return error_text(httpx2.Response(200, text=text).json())
    except ValueError:
        return one_line(text) or "(no explanation)"
