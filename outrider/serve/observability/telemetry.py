"""Around the whole application: a span per HTTP request, and the traffic file. Plain ASGI: streams
pass through untouched.

    engines = [Traced(engine, tracing) for engine in engines]          # so that engine spans join the HTTP span
    app = Telemetry(make_app(state), tracing=tracing, traffic=traffic)

Where neither is asked for there is nothing to put around.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.engine.request import Listener, Request, Update
from outrider.serve.observability.tracing import Tracing
from outrider.serve.observability.traffic import LoggedExchange, TrafficLog
from outrider.serve.serves import Serves

log = logging.getLogger("outrider.serve")
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class Logged(Protocol):
    """A request that was answered, of any interface."""

    def logged(self) -> Iterable[LoggedExchange]: ...


class Telemetry:
    """Wraps the HTTP application: a span per request, and the traffic file."""

    def __init__(
        self, app: ASGIApp, *, tracing: Tracing | None, traffic: TrafficLog | None
    ) -> None:
        self._app = app
        self._tracing = tracing
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING:
            await self._app(scope, receive, send)
            return
        statuses: list[int] = []  # empty: the client left before anything was answered

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        with self._span(scope) as span:
            try:
                await self._app(scope, receive, watch)
            finally:
                if span is not None:
                    span.set_attributes(_attributes(scope, statuses))
        asked = scope.get("state", {}).get("asked")
        if self._traffic is not None and asked is not None and statuses == [200]:
            self._write(self._traffic, scope["path"], asked)

    def _span(self, scope: Scope) -> AbstractContextManager[Any]:
        if self._tracing is None:
            return nullcontext()
        return self._tracing.http_span(
            f"{scope['method']} {scope['path']}", dict(Headers(scope=scope))
        )

    def _write(self, traffic: TrafficLog, path: str, asked: Logged) -> None:
        """An exchange that cannot be written costs a line in the log, never an answer."""
        try:
            for exchange in asked.logged():
                traffic.add(path, exchange)
        except Exception:
            log.exception("an exchange could not be written to the traffic file")


def _attributes(scope: Scope, statuses: Sequence[int]) -> Mapping[str, Any]:
    """OpenTelemetry's names for HTTP servers."""
    attributes: dict[str, Any] = {
        "http.request.method": scope["method"],
        "http.route": scope["path"],
    }
    if statuses:
        attributes["http.response.status_code"] = statuses[0]
    if not statuses or statuses[0] >= 500:
        attributes["error.type"] = str(statuses[0]) if statuses else "client_left"
    return attributes


class Traced:
    """An engine whose requests join the trace they are submitted in. All else is the engine's own."""

    def __init__(self, engine: Serves, tracing: Tracing) -> None:
        self._engine = engine
        self._tracing = tracing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, listener: Listener) -> None:
        """Raises what the engine raises. One that ends before it is queued, as replicas may refuse
        it, leaves nothing behind."""

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
