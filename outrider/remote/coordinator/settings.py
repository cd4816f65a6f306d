"""An operator's settings for a coordinator: its targets, how they are called, and how much is
tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from outrider.errors import ConfigError
from outrider.remote.access import Access
from outrider.serve.settings import ListenSettings
from outrider.settings import checked, setting


@checked()
@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(ListenSettings):
    """Raises ConfigError for impossible values."""

    targets: tuple[str, ...]  # http://HOST:PORT or https://HOST:PORT
    access: Access = field(default_factory=Access)
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
        named = self.access.files
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
