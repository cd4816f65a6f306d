"""The life of a gRPC service: listen, tell health, count, drain, leave.

The standard health service (grpc.health.v1) answers NOT_SERVING while models load and once it
drains, so that probes and load balancers need nothing of ours. `/metrics` is prometheus_client's
own HTTP server, on a port of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, start_http_server

from outrider.errors import ConfigError
from outrider.remote.security import OPTIONS, ServerSecurity, TokenCheck
from outrider.settings import checked, setting

log = logging.getLogger("outrider.service")


class GarbageCheck(aio.ServerInterceptor):
    """Refuses requests that cannot be read. Without it gRPC writes a traceback for each, and calls
    it a fault of the service.

    Calls whose requests are a stream do so themselves.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """A handler whose request is None where its bytes are no message."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        read = handler.request_deserializer
        method = handler_call_details.method
        form = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = getattr(handler, form)

        def read_or_none(data: bytes) -> Any:
            try:
                return read(data)
            except DecodeError:
                return None

        async def check(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
            if request is None:
                log.info(
                    "refused",
                    extra={
                        "call": method,
                        "status": "INVALID_ARGUMENT",
                        "reason": "bytes that are no message",
                    },
                )
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"bytes that are no message of {method}"
                )

        async def answer(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            await check(request, context)
            return await behaviour(request, context)

        async def stream(
            request: Any, context: aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            await check(request, context)
            async with aclosing(behaviour(request, context)) as replies:
                async for reply in replies:
                    yield reply

        checked = stream if inspect.isasyncgenfunction(behaviour) else answer
        return handler._replace(request_deserializer=read_or_none, **{form: checked})


LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


@checked()
@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings of a service's address and access. Raises ConfigError for impossible values."""

    host: str = "127.0.0.1"
    port: int = setting(0, "0 takes a free one", at_least=0, at_most=65535)
    security: ServerSecurity = field(default_factory=ServerSecurity)
    # None: no /metrics
    metrics_port: int | None = setting(None, "of Prometheus", at_least=0, at_most=65535)
    drain_timeout_s: float = setting(
        30.0,
        "seconds for drafts that are waited for after SIGTERM",
        alias="drain_timeout",
        at_least=0,
    )
    max_streams: int = setting(
        256, "calls of one connection at the same time; more wait there", at_least=1
    )

    @property
    def warnings(self) -> list[str]:
        """Notes for an operator on who can reach it, one line each."""
        is_open = self.host not in LOOPBACK and not self.host.startswith("unix:")
        notes = []
        if is_open and not self.security.tokens and self.security.client_ca is None:
            notes.append(
                "anybody who reaches this port is let in: set a token (OUTRIDER_SERVICE_TOKEN) or "
                "--tls-client-ca"
            )
        if is_open and self.security.certificate is None:
            notes.append(
                "the line is not encrypted: --tls-cert and --tls-key, or keep it in a closed "
                "network"
            )
        return notes


class GrpcServer:
    """One listening service. Made and used in one event loop."""

    def __init__(
        self, settings: ServiceSettings, registry: CollectorRegistry | None = None
    ) -> None:
        checks: Sequence[Any] = (
            [TokenCheck(settings.security.tokens)] if settings.security.tokens else []
        )
        interceptors = [*checks, GarbageCheck()]
        self._settings = settings
        self._registry = registry
        options = [*OPTIONS, ("grpc.max_concurrent_streams", settings.max_streams)]
        self.server = aio.server(interceptors=interceptors, options=options)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._metrics: Any = None
        self.address = ""

    async def listen(self) -> None:
        """Bind and begin to answer, health as NOT_SERVING. Raises ConfigError where that is not
        possible."""
        settings = self._settings
        host = settings.host.strip("[]")
        shown = f"[{host}]" if ":" in host and not host.startswith("unix:") else host
        where = host if host.startswith("unix:") else f"{shown}:{settings.port}"
        credentials = settings.security.credentials()
        try:
            port = (
                self.server.add_secure_port(where, credentials)
                if credentials
                else self.server.add_insecure_port(where)
            )
        except RuntimeError as error:
            taken = "the port is taken, or the address is none of this machine's"
            raise ConfigError(f"cannot listen on {where}: {taken}") from error
        if settings.metrics_port is not None:
            try:
                self._metrics, _ = start_http_server(
                    settings.metrics_port, host, self._registry or CollectorRegistry()
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot serve metrics on {shown}:{settings.metrics_port}: {error.strerror}"
                ) from error
        await self.set_serving(False)
        await self.server.start()
        self.address = where if where.startswith("unix:") else f"{shown}:{port}"
        for line in settings.warnings:
            log.warning(line)
        log.info("listening on %s%s", self.address, " with TLS" if credentials else "")

    async def set_serving(self, is_serving: bool) -> None:
        """Set the answer to health checks from now on."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no new calls; end those that run after `grace_s` seconds (None: at once)."""
        await self.set_serving(False)
        await self.server.stop(grace_s)
        if self._metrics is not None:
            self._metrics.shutdown()


async def until_signal() -> None:
    """Return at the first SIGTERM or Ctrl-C; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
