"""The frame of every endpoint: API keys, the size of the body, a bug of ours made a 500; the answer
is counted, carries the request's id and names ignored fields, and a refusal is logged.

Plain ASGI, so that streams pass through untouched and a client's leaving is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import MutableMapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import SERVER, ApiError
from outrider.serve.headers import (
    ID_HEADER,
    IGNORED_HEADER,
    begin_id,
    current_id,
    id_headers,
    ignored_headers,
)
from outrider.serve.observability.metrics import ServerMetrics
from outrider.serve.refusals import answer, reason_of
from outrider.serve.settings import ListenSettings

log = logging.getLogger("outrider.serve")
FAILED = ApiError(
    "the server failed; its log says more", status=500, kind=SERVER, code="internal_error"
)
URGENT = (429, 503)  # what an operator can do something about
READ_AWAY_S = 10  # for the rest of a body that is too large
LONGEST_PATH = 100  # letters of it in the log
# health, metrics and the page itself are open, as vLLM's are
PROTECTED = ("/v1/", "/tokenize", "/detokenize")


def guard(app: FastAPI, settings: ListenSettings, metrics: ServerMetrics) -> None:
    """Put the gate around an application, and around that what lets web pages read its answers,
    refusals too."""
    app.add_middleware(
        Gate, keys=settings.api_keys, max_body_bytes=settings.max_body_bytes, metrics=metrics
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, ID_HEADER],
        )


class Gate:
    """`keys`: none means that everybody may."""

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], max_body_bytes: int, metrics: ServerMetrics
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server sends no body of its answer
            scope = {**scope, "method": "GET"}
        counting = _Counting(scope, send, self._metrics, begin_id(scope))
        try:
            self._check(scope)
            await self._app(scope, _Limited(receive, self._max_body_bytes), counting)
        except _TooLargeError as error:
            refusal = answer(self._too_large(), scope)
            if error.more_comes:
                await _read_away(scope, receive)
            await refusal(scope, receive, counting)
        except ApiError as error:
            await answer(error, scope)(scope, receive, counting)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"], extra=current_id())
            if not counting.begun:
                await answer(FAILED, scope)(scope, receive, counting)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._keys and scope["path"].startswith(PROTECTED) and scope["method"] != "OPTIONS":
            self._check_key(headers.get("authorization") or _of_anthropic(headers))
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self._max_body_bytes:
            raise _TooLargeError(more_comes=True)

    def _check_key(self, given: str) -> None:
        scheme, _, key = given.partition(" ")
        offered = key.strip().encode("utf-8", "surrogateescape")
        # all of them: the time must not tell which
        same = [hmac.compare_digest(offered, own) for own in self._keys]
        if scheme.lower() != "bearer" or not any(same):
            missing = (
                "an API key is required: Authorization: Bearer KEY"
                if not given
                else "the API key is wrong"
            )
            raise ApiError(
                missing, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_body_bytes} bytes, the most this server takes (--max-body-bytes)"
        return ApiError(message, status=413, code="body_too_large", headers={"Connection": "close"})


async def _read_away(scope: Scope, receive: Receive) -> None:
    """Take what is left of a body. Many clients look for an answer when all is sent: cut off
    before, they report a broken connection. Those that ask whether to send at all (`Expect`) need
    not begin."""
    if "expect" in Headers(scope=scope):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READ_AWAY_S):
            while (await receive()).get("more_body"):
                pass


def _of_anthropic(headers: Headers) -> str:
    """The key as Anthropic's clients send it."""
    key = headers.get("x-api-key", "")
    return f"Bearer {key}" if key else ""


class _TooLargeError(BaseException):
    """Passes through handlers of ordinary errors, up to the gate."""

    def __init__(self, *, more_comes: bool) -> None:
        super().__init__()
        self.more_comes = more_comes


class _Limited:
    """Bodies that come in pieces have no length to check beforehand."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._left = max_bytes

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise _TooLargeError(more_comes=message.get("more_body", False))
        return message


class _Counting:
    """Counts the answer under its route's template: raw paths would let anybody fill the metrics."""

    def __init__(
        self, scope: MutableMapping[str, Any], send: Send, metrics: ServerMetrics, identity: str
    ) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._identity = identity
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            route = getattr(self._scope.get("route"), "path", "other")
            self.begun = True
            self._metrics.answered(route, message["status"])
            self._notify(message["status"])
            own_headers = [*ignored_headers(self._scope), *id_headers(self._identity)]
            message = {**message, "headers": [*message.get("headers", ()), *own_headers]}
        await self._send(message)

    def _notify(self, status: int) -> None:
        """Log a refused request, which has no line of a finished one. Health probes, which come
        every few seconds, are left out. So are failures, which are logged where they happen.
        """
        path = self._scope["path"]
        if status >= 400 and status != FAILED.status and path.startswith(PROTECTED):
            level = logging.WARNING if status in URGENT else logging.INFO
            facts = {
                "status": status,
                "method": self._scope["method"],
                "path": path[:LONGEST_PATH],
                "request_id": self._identity,
            }
            log.log(
                level,
                "refused",
                extra={**facts, "reason": reason_of(self._scope) or "no reason was given"},
            )
