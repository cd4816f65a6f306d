"""Which model answers a request, and how it drafts when the client does not say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from outrider.errors import did_you_mean
from outrider.serve.errors import ApiError, unavailable
from outrider.serve.rules import Asked, candidates
from outrider.serve.served import Served, ServerState

Prompts = list[list[int]]
Read = Callable[[Served], Awaitable[Prompts]]


@dataclass(frozen=True)
class Route:
    """The decision."""

    served: Served
    defaults: dict[str, Any]  # of `speculation`
    prompts: Prompts  # token ids


def model_named(state: ServerState, name: str | None) -> str:
    """The name a request means. Raises ApiError for one that is unknown, or missing where there is a choice."""
    check_open(state)
    if name is None:
        if len(state.models) > 1:
            raise ApiError(f"'model' is required: this server has {', '.join(state.names)}", param="model")
        return next(iter(state.models))
    if name not in state.names:
        message = f"the model '{name}' does not exist.{did_you_mean(name, state.names)}"
        raise ApiError(message, status=404, param="model", code="model_not_found")
    return name


def check_open(state: ServerState) -> None:
    """Raises ApiError while the server takes no requests."""
    if state.loading:
        raise unavailable("the models are still loading", "loading")
    if state.draining:
        raise unavailable("the server is shutting down", "shutting_down")


async def choose(state: ServerState, asked: Asked, read: Read) -> Route:
    """The first rule that fits decides. `read` makes the prompts with a model's own tokenizer."""
    prompts: dict[str, Prompts] = {}

    async def prompts_of(served: Served) -> Prompts:
        if served.name not in prompts:
            prompts[served.name] = await read(served)
        return prompts[served.name]

    for rule in candidates(state.settings.rules, asked):
        name = rule.to or asked.model
        if name not in state.models:
            continue  # a rule about drafting, for a name that another rule leads on
        served = state.models[name]
        longest = max(map(len, await prompts_of(served)))
        if rule.fits_length(longest):
            return Route(served, rule.defaults, await prompts_of(served))
    if asked.model not in state.models:
        raise ApiError(f"no route fits this request for '{asked.model}'", status=404, param="model", code="model_not_found")
    served = state.models[asked.model]
    return Route(served, {}, await prompts_of(served))
