"""Routes: which model answers, and how it drafts, by what the request is like. The first rule that
fits decides.

    [[routes]]                       a request that ...
    model = "auto"                   names this model (it need not exist)
    endpoint = "chat"                comes to chat or completions
    tools = true                     brings tools
    structured = true                wants a response format or a grammar
    min_prompt_tokens = 4000         is at least, max_prompt_tokens: at most so long
    to = "small"                     ... is answered by this model
    drafter = "suffix"               with these defaults of `speculation`: the client's own fields win

A rule that asks for the length of a prompt is looked at when the prompt has been read by the
tokenizer of its own model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from outrider.engine.request import Mode, Speculation
from outrider.errors import ConfigError
from outrider.settings import checked

Endpoint = Literal["chat", "completions"]
DEFAULTS = ("mode", "drafter", "max_draft_tokens", "invariant", "lossy")


@checked()
@dataclass(frozen=True, kw_only=True)
class Rule:
    """Conditions that are None do not count. Raises ConfigError for a rule that changes nothing."""

    model: str | None = None
    endpoint: Endpoint | None = None
    tools: bool | None = None
    structured: bool | None = None
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    to: str | None = None
    mode: Mode | None = None
    drafter: str | None = None
    max_draft_tokens: int | None = None
    invariant: bool | None = None
    lossy: str | None = None

    def __post_init__(self) -> None:
        if self.to is None and not self.defaults:
            raise ConfigError(
                f"a route must lead to a model (to) or say how to draft ({', '.join(DEFAULTS)})"
            )
        Speculation(**self.defaults)  # refuses what contradicts itself

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of `speculation`, for requests that leave them out."""
        return {name: value for name in DEFAULTS if (value := getattr(self, name)) is not None}

    @property
    def needs_length(self) -> bool:
        return self.min_prompt_tokens is not None or self.max_prompt_tokens is not None

    def fits(self, asked: RequestFacts) -> bool:
        """Whether all conditions but the prompt's length are met."""
        pairs = (
            (self.model, asked.model),
            (self.endpoint, asked.endpoint),
            (self.tools, asked.tools),
            (self.structured, asked.structured),
        )
        return all(wanted is None or wanted == given for wanted, given in pairs)

    def fits_length(self, num_tokens: int) -> bool:
        low = self.min_prompt_tokens or 0
        high = self.max_prompt_tokens
        return low <= num_tokens and (high is None or num_tokens <= high)


@dataclass(frozen=True)
class RequestFacts:
    """The facts that rules look at, before the prompt is read."""

    model: str
    endpoint: str
    tools: bool
    structured: bool
