"""Options that services share: where they listen and are monitored, who gets in, and how they are called."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.cli.verbs import option
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.remote.security import ClientSecurity
    from outrider.remote.serving import ServiceSettings

SERVICE = "Service"
WATCHING = "Watching"
CALLING = "TLS of calls to services"


@dataclass(frozen=True, kw_only=True)
class ListeningOptions:
    """Options of a service: its address, its access rules, and how it is monitored.

    Each service adds its port and its time to drain.
    """

    host: str = option("127.0.0.1", SERVICE, "Address to listen on; 0.0.0.0 is all of them.")
    metrics_port: int | None = option(None, SERVICE, "Port for Prometheus, /metrics.", show_default="none")
    tls_cert: Path | None = option(None, SERVICE, "Certificate for TLS (PEM).", metavar="FILE")
    tls_key: Path | None = option(None, SERVICE, "Its private key (PEM).", metavar="FILE")
    tls_client_ca: Path | None = option(
        None, SERVICE, "Let in only callers with a certificate of this authority (PEM).", metavar="FILE"
    )
    log_format: Literal["human", "json"] = option("human", WATCHING, "human or json.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", WATCHING, "Least severity of log lines.")
    otlp_endpoint: str | None = option(None, WATCHING, "OpenTelemetry collector for traces.", metavar="URL")

    def settings(self, port: int, drain_timeout: float, **more: int) -> ServiceSettings:
        """What the gRPC server takes; `more`: further fields of `ServiceSettings`. Raises ConfigError for what cannot be."""
        from outrider.remote.security import TOKEN_VARIABLE, ServerSecurity
        from outrider.remote.serving import ServiceSettings

        token = os.environ.get(TOKEN_VARIABLE)
        security = ServerSecurity(
            certificate=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca, tokens=() if token is None else (token,)
        )
        if not 0 <= drain_timeout < float("inf"):
            raise ConfigError(f"--set drain_timeout must be at least 0 seconds, and finite, got {drain_timeout}")
        return ServiceSettings(
            host=self.host, port=port, security=security, metrics_port=self.metrics_port, drain_timeout_s=drain_timeout, **more
        )

    def watching(self) -> dict[str, Any]:
        """Fields of a service's settings about how it is monitored."""
        return {"log_format": self.log_format, "log_level": self.log_level, "otlp_endpoint": self.otlp_endpoint}


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How services are called."""

    tls_ca: Path | None = option(
        None, CALLING, "Who may have signed their certificates (PEM).", metavar="FILE", show_default="the system's"
    )
    tls_cert: Path | None = option(None, CALLING, "Certificate shown to them (PEM), for mutual TLS.", metavar="FILE")
    tls_key: Path | None = option(None, CALLING, "Its private key (PEM).", metavar="FILE")
    tls_server_name: str | None = option(None, CALLING, "Name in their certificates, where it is not the address.")

    def security(self, token: str | None = None) -> ClientSecurity:
        """Raises ConfigError for files that do not fit."""
        from outrider.remote.security import ClientSecurity

        return ClientSecurity(
            ca=self.tls_ca, certificate=self.tls_cert, key=self.tls_key, token=token, server_name=self.tls_server_name
        )
