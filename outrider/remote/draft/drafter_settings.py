"""The options of drafter 'remote'."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.build import ENDPOINT_VARIABLE
from outrider.build import LOCAL_SERVICE as LOCAL
from outrider.errors import ConfigError
from outrider.remote.endpoint import Endpoint
from outrider.remote.security import TOKEN_VARIABLE, ClientSecurity
from outrider.settings import checked, setting


@checked()
@dataclass(frozen=True)
class RemoteSettings:
    """Options of drafter 'remote'. A token stands in the environment only, never among options,
    which results show."""

    endpoint: str | None = setting(
        None,
        "grpc://HOST:PORT, grpcs://HOST:PORT, unix:/PATH, or local; none: that of "
        f"{ENDPOINT_VARIABLE}",
    )
    draft: str | None = setting(
        None, "for endpoint=local: what drafts, a folder, a hub id or a look-up drafter"
    )
    ca: str | None = setting(
        None,
        "PEM file of those who may sign the service's certificate; none: the system's authorities",
    )
    cert: str | None = setting(
        None, "PEM file with our own certificate, for services that ask for one"
    )
    key: str | None = setting(None, "PEM file with its key")
    server_name: str | None = setting(
        None, "name in the service's certificate, where it is not the address"
    )
    token_env: str = setting(TOKEN_VARIABLE, "environment variable with the service's token")
    probs: Literal["auto", "off"] = setting(
        "auto", "off: believe no probabilities, so a service need not be trusted"
    )
    max_wait_ms: float | None = setting(
        None, "longest wait of a step for a draft; none: as long as a plain step takes", at_least=0
    )

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.is_local:
            Endpoint.parse(self.endpoint, "remote option endpoint")
        if self.draft is not None and self.endpoint is not None and not self.is_local:
            raise ConfigError(
                f"remote option draft is for endpoint=local; the service at {self.endpoint} has "
                "its own draft"
            )
        self.security()

    @property
    def address(self) -> str:
        """The endpoint as it was written. Raises ConfigError where there is none."""
        asked = self.endpoint or os.environ.get(ENDPOINT_VARIABLE)
        if not asked:
            raise ConfigError(
                "drafter 'remote' needs to know where the draft service is: --draft-endpoint "
                "grpc://HOST:PORT "
                f"(or {ENDPOINT_VARIABLE}), or --draft-endpoint local for one on this machine"
            )
        return asked

    @property
    def is_local(self) -> bool:
        """Whether the service is started here."""
        return self.endpoint == LOCAL or (
            self.endpoint is None and os.environ.get(ENDPOINT_VARIABLE) == LOCAL
        )

    def security(self) -> ClientSecurity:
        """The credentials shown to the service. Raises ConfigError for half a certificate."""
        paths = {"ca": self.ca, "certificate": self.cert, "key": self.key}
        return ClientSecurity(
            **{
                name: None if file is None else Path(file).expanduser()
                for name, file in paths.items()
            },
            token=os.environ.get(self.token_env) or None,
            server_name=self.server_name,
        )

    @property
    def max_wait_s(self) -> float | None:
        """The longest wait in seconds; None: as long as a plain step takes."""
        return None if self.max_wait_ms is None else self.max_wait_ms / 1e3
