"""The life of a gRPC service: listen, tell health, count, leave.

The standard health service (grpc.health.v1) answers NOT_SERVING while models load and once it
drains, so that probes and load balancers need nothing of ours. `/metrics` is prometheus_client's
own HTTP server, on a port of its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, field
from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, start_http_server

from outrider.errors import ConfigError
from outrider.remote.security import OPTIONS, ServerSecurity, TokenCheck
from outrider.settings import checked, setting

log = logging.getLogger("outrider.service")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
MAX_CALLS = 256  # of one connection at the same time; more wait there


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
        5.0,
        "seconds for drafts that are waited for after SIGTERM",
        alias="drain_timeout",
        at_least=0,
    )

    @property
    def warnings(self) -> list[str]:
        """Notes for an operator on who can reach it, one line each."""
        is_open = self.host not in LOOPBACK and not self.host.startswith("unix:")
        notes = []
        if is_open and self.security.token is None and self.security.client_ca is None:
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

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self.registry = CollectorRegistry()
        token = settings.security.token
        self.server = aio.server(
            interceptors=[] if token is None else [TokenCheck(token)],
            options=[*OPTIONS, ("grpc.max_concurrent_streams", MAX_CALLS)],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._metrics: Any = None
        self.address = ""

    async def listen(self) -> None:
        """Bind and begin to answer, health as NOT_SERVING. Raises ConfigError where that is not
        possible."""
        settings = self._settings
        host = settings.host.strip("[]")
        is_socket = host.startswith("unix:")
        shown = f"[{host}]" if ":" in host and not is_socket else host
        where = host if is_socket else f"{shown}:{settings.port}"
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
                self._metrics, _ = start_http_server(settings.metrics_port, host, self.registry)
            except OSError as error:
                raise ConfigError(
                    f"cannot serve metrics on {shown}:{settings.metrics_port}: {error.strerror}"
                ) from error
        await self.set_serving(False)
        await self.server.start()
        self.address = where if is_socket else f"{shown}:{port}"
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
