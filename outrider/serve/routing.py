"""Which model answers a request, and how it drafts when the client does not choose."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from outrider.errors import QueueFullError, RequestError, did_you_mean
from outrider.serve.errors import ApiError, unavailable
from outrider.serve.rules import RequestFacts, Rule
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
    """The name a request means. Raises ApiError for one that is unknown, or missing where there is
    a choice."""
    check_open(state)
    if name is None:
        if len(state.models) > 1:
            raise ApiError(
                f"'model' is required: this server has {', '.join(state.names)}", param="model"
            )
        return next(iter(state.models))
    if name not in state.names:
        message = f"the model '{name[:60]}' does not exist.{did_you_mean(name, state.names)}"
        raise ApiError(message, status=404, param="model", code="model_not_found")
    return name


def served_named(state: ServerState, name: str | None) -> Served:
    """The one model of that name. Raises ApiError where it stands for several."""
    named = model_named(state, name)
    if named not in state.models:
        raise ApiError(
            f"'{named}' stands for several models: name one of {', '.join(state.models)}",
            param="model",
        )
    return state.models[named]


def check_open(state: ServerState) -> None:
    """Raises ApiError while the server takes no requests."""
    if state.loading:
        raise unavailable("the models are still loading", "loading")
    if state.draining:
        raise unavailable("the server is shutting down", "shutting_down")


async def choose(state: ServerState, asked: RequestFacts, num_requests: int, read: Read) -> Route:
    """The first rule that fits decides. `read` makes the prompts with a model's own tokenizer,
    unless nobody could queue all of `num_requests`: a body may ask for a hundred thousand, and
    refusing must cost less than answering.

    Raises ApiError where no model is left, and what an engine's `check_room` raises.
    """
    prompts: dict[str, Prompts] = {}

    async def prompts_of(served: Served) -> Prompts:
        if served.name not in prompts:
            prompts[served.name] = await read(served)
        return prompts[served.name]

    possible = _possible(state, asked)
    _check_room((served for _, served in possible), num_requests)
    for rule, served in possible:
        if rule is None or rule.fits_length(max(map(len, await prompts_of(served)))):
            served.engine.check_room(num_requests)
            return Route(served, {} if rule is None else rule.defaults, await prompts_of(served))
    raise ApiError(
        f"no route fits this request for '{asked.model}'",
        status=404,
        param="model",
        code="model_not_found",
    )


def _possible(state: ServerState, asked: RequestFacts) -> list[tuple[Rule | None, Served]]:
    """The rules and models that may answer, as the prompt's length will decide; None: by no rule."""
    rules: list[tuple[Rule | None, Served]] = []
    for rule in _candidates(state.settings.rules, asked):
        name = rule.to or asked.model
        # else a rule about drafting, for a name that another rule leads on
        if name in state.models:
            rules.append((rule, state.models[name]))
            if not rule.needs_length:
                return rules
    if asked.model in state.models:
        rules.append((None, state.models[asked.model]))
    return rules


def _candidates(rules: Iterable[Rule], asked: RequestFacts) -> list[Rule]:
    """Rules that may decide, in order: those with a length to check, up to the first without."""
    candidates = []
    for rule in rules:
        if rule.fits(asked):
            candidates.append(rule)
            if not rule.needs_length:
                break
    return candidates


def _check_room(possible: Iterable[Served], num_requests: int) -> None:
    """Raises the refusal when all of them refuse; one that may be over later, where there is one."""
    refusals: list[QueueFullError | RequestError] = []
    for served in possible:
        try:
            served.engine.check_room(num_requests)
        except (QueueFullError, RequestError) as error:
            refusals.append(error)
        else:
            return
    if refusals:
        raise next(
            (refusal for refusal in refusals if isinstance(refusal, QueueFullError)), refusals[0]
        )
