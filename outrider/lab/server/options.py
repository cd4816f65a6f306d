"""A server's address and key, what it is sent, and how much at a time; the body of a request under both OpenAI endpoints.

A key never comes from the command line, which other users of a machine can read and which results record: it comes from an
environment variable, goes into one header, and is cut out of every message a server sends back.

Only what was asked for is sent: a parameter at its default is the server's to choose (vLLM takes the model's generation
config, llama.cpp its own top-k and min-p); the notes mention it when texts are sampled.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

from outrider.errors import ConfigError
from outrider.lab.server.types import Level
from outrider.lab.workload.types import WorkloadRequest
from outrider.sampling.params import SamplingParams

API = "/v1"
ALWAYS = ("temperature", "max_tokens")  # sent whatever their value
OURS = ("model", "stream", "stream_options", "prompt", "messages", "n")  # an extra field may not replace these; it may drop one
SALT, SALTED_ENGINES = "cache_salt", ("vllm",)  # prompts with different salts are kept apart in their prefix cache
SALT_NOTE = f"prompts are new to the prefix cache at every level ({SALT})"


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


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a workload is put to a server. Raises ConfigError for what cannot be done."""

    concurrency: tuple[int, ...] = (1, 4, 16)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    api: Literal["auto", "chat", "completions"] = "auto"  # auto: conversations to chat, prompts to completions
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of the body; None drops one
    warmup: int = 2  # short requests before each level, not counted; at least as many as are in flight; 0: none
    timeout_s: float = 300.0  # without a sign of life
    settle_s: float = 0.25  # between two readings of the counters, until they stand still

    def __post_init__(self) -> None:
        if not self.concurrency:
            raise ConfigError("there is no level to measure at: give a concurrency")
        if any(number < 1 for number in self.concurrency):
            raise ConfigError(f"a concurrency is 1 or more; got {min(self.concurrency)}")
        if self.timeout_s <= 0 or self.warmup < 0 or self.settle_s < 0:
            raise ConfigError("the timeout is more than 0 s, warm-up and settling time are not negative")
        if self.api not in ("auto", "chat", "completions"):
            raise ConfigError(f"the API is auto, chat or completions; got '{self.api}'")
        if self.sampling.max_tokens is None or self.sampling.n != 1:
            raise ConfigError("what is measured has a length and one answer: max_tokens must be a number, n must be 1")
        if self.sampling.logprobs is not None:
            raise ConfigError("logprobs are not asked of a server that is measured: they cost time and nothing here reads them")
        if taken := [name for name in OURS if self.extra.get(name) is not None]:
            raise ConfigError(f"the field '{taken[0]}' of the request is set by the measurement; it cannot be given as extra")

    @property
    def levels(self) -> list[Level]:
        """In the order they are measured, without doubles."""
        return [Level(concurrency=number) for number in dict.fromkeys(self.concurrency)]

    def is_salted(self, engine: str) -> bool:
        """Whether the engine takes a salt, and the user has neither set nor dropped it (None)."""
        return engine in SALTED_ENGINES and SALT not in self.extra

    def salted(self, engine: str) -> LoadOptions:
        """These options with a salt that no request had before, so that no prompt is found in a cache."""
        if not self.is_salted(engine):
            return self
        return replace(self, extra={**self.extra, SALT: secrets.token_hex(8)})

    def body(self, request: WorkloadRequest, model: str) -> tuple[str, dict[str, Any]]:
        """(path, JSON body) of a request. Raises ConfigError for a conversation that must go to /completions."""
        path, content = self._content(request)
        defaults = SamplingParams()
        asked = {one.name: getattr(self.sampling, one.name) for one in fields(SamplingParams)}
        sampling = {name: value for name, value in asked.items() if name in ALWAYS or value != getattr(defaults, name)}
        if request.max_tokens is not None:
            sampling["max_tokens"] = self.sampling.limit(request.max_tokens)
        body = {
            "model": model, **content, **sampling, "stream": True, "stream_options": {"include_usage": True}, **self.extra,
        }  # fmt: skip
        return path, {name: value for name, value in body.items() if value is not None}

    def _content(self, request: WorkloadRequest) -> tuple[str, dict[str, Any]]:
        chat = self.api == "chat" or (self.api == "auto" and request.messages is not None)
        if chat:
            messages = request.messages or ({"role": "user", "content": request.prompt or ""},)
            return "/v1/chat/completions", {"messages": list(messages)}
        if request.messages is not None:
            raise ConfigError(
                f"request '{request.id}' is a conversation, and only the server knows its chat template: use the API chat or auto"
            )
        return "/v1/completions", {"prompt": request.prompt}
