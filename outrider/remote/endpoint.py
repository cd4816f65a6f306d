"""The address of a service: `grpc://HOST:PORT`, `grpcs://HOST:PORT` (TLS), or `unix:/PATH` (one
machine)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.errors import ConfigError

ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})"
)


@dataclass(frozen=True)
class Endpoint:
    """One address."""

    target: str  # as grpc takes it: host:port, [::1]:port or unix:/path
    is_tls: bool = False

    @classmethod
    def parse(cls, text: str, name: str = "endpoint") -> Endpoint:
        """Read an address; `name` is the option it came from. Raises ConfigError with what a right
        one looks like."""
        scheme, separator, rest = text.strip().partition("://")
        if text.strip().startswith("unix:/"):
            return cls(text.strip())
        if not separator:
            scheme = "grpc"
            rest = text.strip()
        match = ADDRESS.fullmatch(rest.rstrip("/"))
        if scheme not in ("grpc", "grpcs") or match is None or not 0 < int(match["port"]) < 65536:
            forms = "grpc://HOST:PORT, grpcs://HOST:PORT or unix:/PATH"
            raise ConfigError(f"{name} must be like {forms}, got '{text}'{_hint(scheme)}")
        return cls(rest.rstrip("/"), scheme == "grpcs")

    def __str__(self) -> str:
        return (
            self.target
            if self.target.startswith("unix:")
            else f"{'grpcs' if self.is_tls else 'grpc'}://{self.target}"
        )


def _hint(scheme: str) -> str:
    return (
        "; an HTTP address is an OpenAI server's, not a service's"
        if scheme in ("http", "https")
        else ""
    )
