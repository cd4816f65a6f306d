"""Targets that are the URL of an OpenAI-compatible server, and how it is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outrider.cli.verbs import option
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.lab.server.client import ServerEndpoint

SERVERS = "For a server's URL"
ADDRESS = re.compile(r"[\w.-]+:\d{1,5}(/\S*)?")  # a hub's file has a / before its colon
# in one text: `verbs.gathered`
SELDOM_SERVER = ("server_model", "api", "api_key_env", "baseline_api_key_env", "stall_timeout")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """For targets that are the URL of an OpenAI-compatible server."""

    baseline_url: str | None = option(
        None, SERVERS, "The same model without speculation, to compare with.", common=True
    )
    concurrency: int = option(1, SERVERS, "Requests in flight.", min=1, common=True)
    server_model: str | None = option(
        None, SERVERS, "Which of the server's models.", show_default="the only one"
    )
    api: Literal["auto", "chat", "completions"] = option("auto", SERVERS, "Which endpoint.")
    api_key_env: str | None = option(
        None, SERVERS, "Environment variable with the API key.", metavar="NAME"
    )
    baseline_api_key_env: str | None = option(
        None,
        SERVERS,
        "api_key_env of --baseline-url; '' sends it no key.",
        metavar="NAME",
        show_default="api_key_env",
    )
    stall_timeout: float = option(300.0, SERVERS, "Seconds without a sign of life.")

    def endpoints(self, url: str) -> dict[str, ServerEndpoint]:
        """The server, after the one to compare it with where there is one. Raises ConfigError."""
        from outrider.lab.server.client import ServerEndpoint, key_from

        key = key_from(self.api_key_env)
        named = self.baseline_api_key_env
        if self.baseline_url is None:
            if named is not None:
                raise ConfigError(
                    "--server baseline_api_key_env means nothing without --baseline-url"
                )
            return {"server": ServerEndpoint.parse(url, api_key=key, model=self.server_model)}
        plain_key = key if named is None else key_from(named or None)
        return {
            "plain": ServerEndpoint.parse(
                self.baseline_url, api_key=plain_key, model=self.server_model
            ),
            "speculative": ServerEndpoint.parse(url, api_key=key, model=self.server_model),
        }


def is_server(target: str) -> bool:
    """Whether a target is a URL. Raises ConfigError for HOST:PORT alone, which is neither that nor
    a model."""
    if ADDRESS.fullmatch(target) and not Path(target).exists():
        raise ConfigError(f"'{target}' looks like a server's address: write http://{target}")
    return target.startswith(("http://", "https://"))
