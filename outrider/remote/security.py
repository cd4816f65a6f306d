"""Access control and encryption of the draft service's line: TLS, mutual TLS and a token, for both
sides.

A token is sent in the metadata `authorization` as `Bearer TOKEN`, on every call. Without TLS it can
be read on the way; use that on one machine or a closed network only. The service warns of it.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc import aio

from outrider.errors import ConfigError
from outrider.remote.access import (
    TOKEN_VARIABLE,
    Access,
    check_token,
    load_authority,
    load_pair,
)
from outrider.remote.endpoint import Endpoint
from outrider.remote.protocol import MAX_MESSAGE_BYTES

HEALTH = "/grpc.health.v1.Health/"  # probes of an orchestrator carry no token
OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # a peer that vanished without a word is noticed within seconds
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),  # an idle line is pinged, too: no reason to close it
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
]


@dataclass(frozen=True, kw_only=True)
class ServerSecurity:
    """The credentials that a service asks of its callers."""

    certificate: Path | None = None  # PEM; None: no TLS
    key: Path | None = None
    # PEM: callers must show a certificate that it signed (mutual TLS)
    client_ca: Path | None = None
    token: str | None = None  # None: nobody is asked for one

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                "TLS needs a certificate and its key: --tls-cert FILE and --tls-key FILE"
            )
        if self.client_ca is not None and self.certificate is None:
            raise ConfigError(
                "--tls-client-ca asks callers for certificates, which needs TLS: add --tls-cert "
                "and --tls-key"
            )
        if self.token == "":
            raise ConfigError(
                f"a service token is empty: set {TOKEN_VARIABLE} to a secret, or leave it out"
            )
        check_token(self.token)

    def credentials(self) -> grpc.ServerCredentials | None:
        """The credentials of a grpc server; None without TLS. Raises ConfigError for files that
        cannot be read or do not fit, of which gRPC would report only that a handshake failed."""
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_pair(context, self.certificate, self.key)
        if self.client_ca is not None:
            load_authority(context, self.client_ca)
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=_content(self.client_ca),
            require_client_auth=self.client_ca is not None,
        )


def check_access(access: Access, endpoint: Endpoint) -> None:
    """Raises ConfigError for files that cannot be read, do not fit one another, or mean nothing
    without TLS."""
    if access.files and not endpoint.is_tls:
        raise ConfigError(
            f"{access.files[0]} is for TLS, but {endpoint} is without it: write grpcs://HOST:PORT"
        )
    access.context()


def channel_to(endpoint: Endpoint, access: Access) -> aio.Channel:
    """A channel to a service; it connects when it is used. Raises ConfigError as `check_access`
    does."""
    check_access(access, endpoint)
    options = list(OPTIONS)
    if access.server_name is not None:
        options.append(("grpc.ssl_target_name_override", access.server_name))
    if not endpoint.is_tls:
        return aio.insecure_channel(endpoint.target, options)
    credentials = grpc.ssl_channel_credentials(
        _content(access.ca), _content(access.key), _content(access.certificate)
    )
    return aio.secure_channel(endpoint.target, credentials, options)


def metadata_of(access: Access) -> tuple[tuple[str, str], ...]:
    """The metadata of every call."""
    return () if access.token is None else (("authorization", f"Bearer {access.token}"),)


def _content(file: Path | None) -> bytes | None:
    return None if file is None else file.read_bytes()


class TokenCheck(aio.ServerInterceptor):
    """Refuses calls without the token, health checks excepted."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Let the call through, or answer it with UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        shown = given if isinstance(given, bytes) else given.encode()
        if (
            handler is None
            or handler_call_details.method.startswith(HEALTH)
            or hmac.compare_digest(shown, self._expected)
        ):
            return handler
        kind = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return kind(_refuse)


async def _refuse(request: object, context: aio.ServicerContext) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, f"no service token, or a wrong one: set {TOKEN_VARIABLE}"
    )
