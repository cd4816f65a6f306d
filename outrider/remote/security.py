"""Access control and encryption of services: TLS, mutual TLS and tokens, for both sides of a
connection.

A token is sent in the metadata `authorization` as `Bearer TOKEN`, on every call. Without TLS it can
be read on the way; use that on one machine or a closed network only. Both sides warn once.
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
from outrider.remote.endpoint import Endpoint
from outrider.remote.protocol import MAX_MESSAGE_BYTES

TOKEN_VARIABLE = "OUTRIDER_SERVICE_TOKEN"
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
    tokens: tuple[str, ...] = ()  # any of them is let in; none: nobody is asked

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
        if "" in self.tokens:
            raise ConfigError(
                f"a service token is empty: set {TOKEN_VARIABLE} to a secret, or leave it out"
            )
        for token in self.tokens:
            _check_token(token)

    def credentials(self) -> grpc.ServerCredentials | None:
        """The credentials of a grpc server; None without TLS. Raises ConfigError for files that
        cannot be read or do not fit."""
        if self.certificate is None or self.key is None:
            return None
        pair = (_read(self.key), _read(self.certificate))
        _check_pair(self.certificate, self.key)
        if self.client_ca is not None:
            _check_authority(self.client_ca)
        roots = None if self.client_ca is None else _read(self.client_ca)
        return grpc.ssl_server_credentials(
            [pair], root_certificates=roots, require_client_auth=roots is not None
        )


@dataclass(frozen=True, kw_only=True)
class ClientSecurity:
    """A client's credentials, and the authorities that it trusts."""

    # PEM: who may have signed the service's certificate; None: the system's authorities
    ca: Path | None = None
    certificate: Path | None = None  # PEM, for mutual TLS
    key: Path | None = None
    token: str | None = None
    server_name: str | None = None  # in the service's certificate, where it is not the address

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                "mutual TLS needs a certificate and its key: --tls-cert FILE and --tls-key FILE"
            )
        if self.token is not None:
            _check_token(self.token)

    def check(self, endpoint: Endpoint) -> None:
        """Raises ConfigError for files that cannot be read, do not fit one another, or mean nothing
        without TLS."""
        named = [file for file in (self.ca, self.certificate, self.key) if file is not None]
        if named and not endpoint.is_tls:
            raise ConfigError(
                f"{named[0]} is for TLS, but {endpoint} is without it: write grpcs://HOST:PORT"
            )
        self._check_files()

    def channel(self, endpoint: Endpoint) -> aio.Channel:
        """A channel to a service; it connects when it is used. Raises ConfigError for files that
        cannot be read or do not fit."""
        options = list(OPTIONS)
        if self.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        if not endpoint.is_tls:
            return aio.insecure_channel(endpoint.target, options)
        self._check_files()
        credentials = grpc.ssl_channel_credentials(
            None if self.ca is None else _read(self.ca),
            None if self.key is None else _read(self.key),
            None if self.certificate is None else _read(self.certificate),
        )
        return aio.secure_channel(endpoint.target, credentials, options)

    def _check_files(self) -> None:
        for file in (self.ca, self.certificate, self.key):
            if file is not None:
                _read(file)
        if self.ca is not None:
            _check_authority(self.ca)
        if self.certificate is not None and self.key is not None:
            _check_pair(self.certificate, self.key)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


class TokenCheck(aio.ServerInterceptor):
    """Refuses calls without one of the tokens, health checks excepted."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._expected = [f"Bearer {token}".encode() for token in tokens]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Let the call through, or answer it with UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        if (
            handler is None
            or handler_call_details.method.startswith(HEALTH)
            or self._may(handler_call_details)
        ):
            return handler
        return _refusing(handler)

    def _may(self, call: grpc.HandlerCallDetails) -> bool:
        shown = dict(call.invocation_metadata or ()).get("authorization", "")
        given = shown if isinstance(shown, bytes) else shown.encode()
        # all of them: time tells nothing
        return any([hmac.compare_digest(given, token) for token in self._expected])


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same kind that refuses with the reason."""

    async def refuse(request: object, context: aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"no service token, or a wrong one: set {TOKEN_VARIABLE}",
        )

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _check_token(token: str) -> None:
    """Raises ConfigError for a token that no header can carry; a file's last line break is the
    usual reason."""
    wrong = next((character for character in token if not " " <= character <= "~"), None)
    if wrong is not None:
        raise ConfigError(
            f"a service token has printable ASCII characters only; this one ({TOKEN_VARIABLE}) "
            f"has {wrong!a} at place "
            f"{token.index(wrong) + 1} of {len(token)}"
        )


def _check_pair(certificate: Path, key: Path) -> None:
    """Raise ConfigError where grpc would report only that a handshake failed."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate, key, password=lambda: ""
        )
    except (ssl.SSLError, ValueError) as error:
        is_other = "MISMATCH" in str(error)
        why = (
            "are not of one pair"
            if is_other
            else "are no PEM certificate and private key without a password"
        )
        raise ConfigError(
            f"{certificate} and {key} {why}: make both anew, or name the files that belong together"
        ) from error


def _check_authority(file: Path) -> None:
    """Raises ConfigError for a file without certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError as error:
        raise ConfigError(f"{file} holds no PEM certificate of an authority") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
