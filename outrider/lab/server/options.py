"""What is sent to a server, and how much of it at a time; the body of a request under both OpenAI endpoints.

Only what was asked for is sent: a parameter at its default is the server's to choose (vLLM takes the model's generation
config, llama.cpp its own top-k and min-p); the notes mention it when texts are sampled.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from outrider.errors import ConfigError
from outrider.lab.server.types import Level
from outrider.lab.workload.types import WorkloadRequest
from outrider.sampling.params import SamplingParams

ALWAYS = ("temperature", "max_tokens")  # sent whatever their value
OURS = ("model", "stream", "stream_options", "prompt", "messages", "n")  # an extra field may not replace these; it may drop one
SALT, SALTED_ENGINES = "cache_salt", ("vllm",)  # prompts with different salts are kept apart in their prefix cache
SALT_NOTE = f"prompts are new to the prefix cache at every level ({SALT})"


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
        """With a salt that no request had before, so that a level's prompts are not found in the cache of an earlier one."""
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
