"""Around the whole application: a span per HTTP request, and the traffic file. Plain ASGI: streams pass through untouched.

    engines = [Traced(engine, tracing) for engine in engines]          # so that engine spans join the HTTP span
    app = Telemetry(make_app(state), tracing=tracing, traffic=traffic, decode=lambda model, ids: ...)

Where neither is asked for there is nothing to put around.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.engine.request import Listener, Request, Update
from outrider.serve.observability.tracing import Tracing
from outrider.serve.observability.traffic import TrafficLog
from outrider.serve.observability.transcript import Decode, Transcript
from outrider.serve.refusals import reason_of
from outrider.serve.served import Serves

log = logging.getLogger("outrider.serve")
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class Telemetry:
    """Wraps the HTTP application: a span per request, and the traffic file.

    `decode`: prompts given as token ids are written as text.
    """

    def __init__(self, app: ASGIApp, *, tracing: Tracing | None, traffic: TrafficLog | None, decode: Decode) -> None:
        self._app, self._tracing, self._traffic, self._decode = app, tracing, traffic, decode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING:
            await self._app(scope, receive, send)
            return
        watched = _Watched(scope, receive, send, transcript=Transcript() if self._traffic is not None else None)
        with self._span(scope) as span:
            try:
                await self._app(scope, watched.receive, watched.send)
            finally:
                if span is not None:
                    span.set_attributes(watched.attributes())
        if watched.transcript is not None and watched.status == 200:
            self._write(scope["path"], watched.transcript, _as_chat(scope))

    def _span(self, scope: Scope) -> AbstractContextManager[Any]:
        if self._tracing is None:
            return nullcontext()
        return self._tracing.http_span(f"{scope['method']} {scope['path']}", dict(Headers(scope=scope)))

    def _write(self, path: str, transcript: Transcript, as_chat: dict[str, Any] | None) -> None:
        """A body that cannot be read again costs a line in the log, never an answer. `as_chat`: the body as that of a chat
        completion, where it came by another interface."""
        assert self._traffic is not None
        try:
            for body, answers, usage, name in transcript.entries(self._decode, as_chat):
                self._traffic.add(
                    request_id=name, url=path, body=body, texts=[answer.text for answer in answers],
                    thoughts=[answer.thought for answer in answers], finish_reasons=[answer.finish_reason for answer in answers],
                    usage=usage,
                )  # fmt: skip
        except Exception:
            log.exception("an exchange could not be written to the traffic file")


def _as_chat(scope: Scope) -> dict[str, Any] | None:
    asked = scope.get("state", {}).get("asked")
    return None if asked is None else asked.as_chat


class _Watched:
    """What passes between the server and the application."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, transcript: Transcript | None) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.transcript = transcript
        self.status: int | None = None  # None: the client left before anything was answered

    async def receive(self) -> Message:
        message = await self._receive()
        is_refused = reason_of(self._scope) is not None  # what is left of a body that is too large is read away
        if self.transcript is not None and message["type"] == "http.request" and not is_refused:
            self.transcript.asked += message.get("body", b"")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self.transcript is not None and message["type"] == "http.response.body":
            self.transcript.answered += message.get("body", b"")
        await self._send(message)

    def attributes(self) -> Mapping[str, Any]:
        """OpenTelemetry's names for HTTP servers."""
        found: dict[str, Any] = {"http.request.method": self._scope["method"], "http.route": self._scope["path"]}
        if self.status is not None:
            found["http.response.status_code"] = self.status
        if self.status is None or self.status >= 500:
            found["error.type"] = str(self.status or "client_left")
        return found


class Traced:
    """An engine whose requests join the trace they are submitted in. All else is the engine's own."""

    def __init__(self, engine: Serves, tracing: Tracing) -> None:
        self._engine, self._tracing = engine, tracing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, listener: Listener) -> None:
        """Raises what the engine raises. One that ends before it is queued, as replicas may refuse it, leaves nothing behind."""

        def listen(update: Update) -> None:
            if update.finish is not None:
                self._tracing.refused(request)
            listener(update)

        self._tracing.arrived(request)
        try:
            self._engine.submit(request, listen)
        except BaseException:
            self._tracing.refused(request)
            raise
