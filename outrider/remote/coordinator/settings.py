"""An operator's settings for a coordinator: its targets, how they are called, and how much is
tried."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from outrider.errors import ConfigError
from outrider.serve.settings import ListenSettings
from outrider.settings import checked, setting


@checked()
@dataclass(frozen=True, kw_only=True)
class TargetAccess:
    """How targets are called. Raises ConfigError for a key that no header can carry."""

    token: str | None = None  # a key that targets ask for; None: the client's own is passed on
    # PEM: who may have signed their certificates; None: the system's authorities
    ca: Path | None = None
    certificate: Path | None = None  # PEM, for mutual TLS
    key: Path | None = None
    server_name: str | None = None  # in their certificates, where it is not the address

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                "mutual TLS needs a certificate and its key: --tls-cert FILE and --tls-key FILE"
            )
        if self.token is not None and (not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError(
                "OUTRIDER_SERVICE_TOKEN has characters that no header can carry: use printable "
                "ASCII ones"
            )

    def context(self) -> ssl.SSLContext:
        """TLS of calls. Raises ConfigError for files that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None and self.key is not None:
                context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = ", ".join(
                str(file) for file in (self.ca, self.certificate, self.key) if file is not None
            )
            raise ConfigError(
                f"these TLS files cannot be used together ({files}): {error}"
            ) from error
        return context


@checked()
@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(ListenSettings):
    """Raises ConfigError for impossible values."""

    targets: tuple[str, ...]  # http://HOST:PORT or https://HOST:PORT
    access: TargetAccess = field(default_factory=TargetAccess)
    max_retries: int = setting(3, "targets that a request may lose, no token between", at_least=0)
    wait_s: float = setting(
        30.0, "seconds to wait for a target, when none answers", alias="replica_wait", above=0
    )
    stall_s: float = setting(
        10.0,
        "seconds of silence, after which a target is given up",
        alias="stall_timeout",
        above=0,
    )
    max_queue: int = setting(256, "requests that may wait while no target answers", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [file for file in (self.access.ca, self.access.certificate) if file is not None]
        if named and not any(target.startswith("https:") for target in self.targets):
            raise ConfigError(
                f"{named[0]} is for TLS, and no target is called with it: write https://HOST:PORT"
            )


def parsed_targets(texts: Sequence[str]) -> tuple[str, ...]:
    """Addresses as written, several with commas between. Raises ConfigError for none, for one
    twice, and for no address."""
    addresses = [
        part.strip().rstrip("/") for text in texts for part in text.split(",") if part.strip()
    ]
    if not addresses:
        raise ConfigError(
            "name the targets: --target-endpoint http://A:8000,http://B:8000 (or the variable "
            "TARGET_ENDPOINT)"
        )
    full = tuple(address if "://" in address else f"http://{address}" for address in addresses)
    for address in full:
        _check_address(address)
    if len(set(full)) < len(full):
        raise ConfigError(f"--target-endpoint names an address twice: {', '.join(addresses)}")
    return full


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
        is_right = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
        )
    except ValueError:  # a port that is no number
        is_right = False
    if not is_right or parts.path or parts.query or parts.username:
        hint = (
            "; targets are 'outrider serve', which speaks HTTP"
            if address.startswith("grpc")
            else ""
        )
        raise ConfigError(
            "--target-endpoint must be like http://HOST:PORT or https://HOST:PORT, got "
            f"'{address}'{hint}"
        )
