"""A server's address, its key, and which of its models is meant.

A key never comes from the command line, which other users of a machine can read and which results record: it comes from an
environment variable, goes into one header, and is cut out of every message a server sends back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx2

from outrider.errors import ConfigError

API = "/v1"


@dataclass(frozen=True)
class ServerEndpoint:
    """`root`: the URL up to and without /v1, where /metrics and /version lie."""

    url: str  # as the user wrote it
    root: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None  # None: the only one it serves

    @classmethod
    def parse(cls, url: str, *, api_key: str | None = None, model: str | None = None) -> ServerEndpoint:
        """From `http://host:port`, with or without /v1 and what follows it. Raises ConfigError."""
        try:
            parts = urlsplit(url.strip())
            _ = parts.port  # reading it checks it
        except ValueError as error:
            raise ConfigError(f"'{url}' is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"a server is given as http://HOST:PORT or https://HOST/PATH; got '{url}'")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError("a server's URL holds no password and no query: results would record it; keys come by environment")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key has characters that no HTTP header can carry; is there a line break at its end?")
        path = (parts.path.rstrip("/") + "/").rsplit(f"{API}/", 1)[0].rstrip("/")
        root = f"{parts.scheme}://{parts.netloc}{path}"
        try:
            httpx2.URL(root)
        except httpx2.InvalidURL as error:
            raise ConfigError(f"'{url}' is no URL: {error}") from error
        return cls(url.strip(), root, api_key, model)

    @property
    def is_local(self) -> bool:
        """On this machine: a proxy between would be measured too."""
        host = urlsplit(self.root).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def clean(self, text: str) -> str:
        """Without the key: servers repeat it in their errors."""
        return text.replace(self.api_key, "***") if self.api_key else text


def key_from(variable: str | None) -> str | None:
    """The API key in an environment variable; None where none is named. Raises ConfigError when it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable}, which should hold the API key, is not set or empty")
    return key
