"""The options of drafter 'remote'."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.errors import ConfigError
from outrider.remote.access import TOKEN_VARIABLE, Access
from outrider.remote.endpoint import Endpoint
from outrider.settings import checked, setting

ENDPOINT_VARIABLE = "DRAFT_ENDPOINT"


@checked()
@dataclass(frozen=True)
class RemoteSettings:
    """Options of drafter 'remote'. A token stands in the environment only, never among options,
    which results show."""

    endpoint: str | None = setting(
        None,
        f"grpc://HOST:PORT, grpcs://HOST:PORT or unix:/PATH; none: that of {ENDPOINT_VARIABLE}",
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
    probs: Literal["auto", "off"] = setting(
        "auto", "off: believe no probabilities, so a service need not be trusted"
    )
    max_wait_ms: float | None = setting(
        None, "longest wait of a step for a draft; none: as long as a plain step takes", at_least=0
    )

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            Endpoint.parse(self.endpoint, "remote option endpoint")
        self.access()

    @property
    def address(self) -> Endpoint:
        """The service's address. Raises ConfigError where there is none."""
        asked = self.endpoint or os.environ.get(ENDPOINT_VARIABLE)
        if not asked:
            raise ConfigError(
                "drafter 'remote' needs to know where the draft service is: --draft-endpoint "
                f"grpc://HOST:PORT (or {ENDPOINT_VARIABLE})"
            )
        return Endpoint.parse(asked, "--draft-endpoint")

    def access(self) -> Access:
        """How the service is called. Raises ConfigError for half a certificate."""
        return Access(
            ca=_path(self.ca),
            certificate=_path(self.cert),
            key=_path(self.key),
            token=os.environ.get(TOKEN_VARIABLE) or None,
            server_name=self.server_name,
        )

    @property
    def max_wait_s(self) -> float | None:
        """The longest wait in seconds; None: as long as a plain step takes."""
        return None if self.max_wait_ms is None else self.max_wait_ms / 1e3


def _path(file: str | None) -> Path | None:
    return None if file is None else Path(file).expanduser()
