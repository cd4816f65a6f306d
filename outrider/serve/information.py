"""Endpoints that tell: models, tokens, health, version, metrics."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.serve.api.dialogue import render, unread_thoughts
from outrider.serve.api.exchange import check_ids
from outrider.serve.api.generating import ERRORS, example
from outrider.serve.errors import ApiError, unavailable
from outrider.serve.headers import ignored_fields
from outrider.serve.refusals import asks_as_anthropic
from outrider.serve.routing import check_open, model_named, served_named
from outrider.serve.schema.answers import (
    AnthropicModel,
    AnthropicModels,
    DetokenizeAnswer,
    DetokenizeBody,
    ErrorAnswer,
    Health,
    ModelCard,
    ModelList,
    Ready,
    TokenizeAnswer,
    TokenizeBody,
    Version,
)
from outrider.serve.served import Served, ServerState
from outrider.version import __version__

UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorAnswer, "description": "Not now."}
}


def information_routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["information"])

    @router.get("/v1/models", responses={401: ERRORS[401], 503: ERRORS[503]})
    async def models(request: Request) -> ModelList | AnthropicModels:
        """The names that `model` may have. In Anthropic's form where the request has its header
        `anthropic-version`."""
        check_open(state)
        cards = [_card(state, name) for name in state.names]
        if not asks_as_anthropic(request.scope):
            return ModelList(data=cards)
        return AnthropicModels(
            data=[_as_anthropic(card) for card in cards], first_id=cards[0].id, last_id=cards[-1].id
        )

    @router.get("/v1/models/{model:path}", responses={n: ERRORS[n] for n in (401, 404, 503)})
    async def model(model: str, request: Request) -> ModelCard | AnthropicModel:
        """One of them."""
        card = _card(state, model_named(state, model))
        return _as_anthropic(card) if asks_as_anthropic(request.scope) else card

    @router.post("/tokenize", responses={n: ERRORS[n] for n in (400, 401, 404, 413, 503)})
    async def tokenize(
        body: Annotated[TokenizeBody, example({"prompt": "The sky is"})], request: Request
    ) -> TokenizeAnswer:
        """Token ids of a text or of a conversation."""
        ignored = ignored_fields(request, state.ignored, body)
        served = served_named(state, body.model)
        ignored.add(unread_thoughts(body.messages, served))
        tokens = await _tokens(served, body)
        names = (
            [served.texts.bytes.name(token) for token in tokens] if body.return_token_strs else None
        )
        return TokenizeAnswer(
            count=len(tokens), max_model_len=served.engine.context, tokens=tokens, token_strs=names
        )

    @router.post("/detokenize", responses={n: ERRORS[n] for n in (400, 401, 404, 413, 503)})
    async def detokenize(
        body: Annotated[DetokenizeBody, example({"tokens": [5, 6, 7]})], request: Request
    ) -> DetokenizeAnswer:
        """The text of token ids."""
        ignored_fields(request, state.ignored, body)
        served = served_named(state, body.model)
        check_ids(body.tokens, served, "tokens")
        # millions take seconds
        return DetokenizeAnswer(prompt=await asyncio.to_thread(served.texts.decode, body.tokens))

    @router.get("/health", responses=UNAVAILABLE, response_model_exclude_unset=True)
    async def health() -> Health:
        """200 while the process and every engine's thread live and come round; start a server again
        that fails this."""
        _check_alive(state)
        return Health(status="ok")

    @router.get("/ready", responses=UNAVAILABLE, response_model_exclude_unset=True)
    async def ready() -> Ready:
        """200 while requests are taken: not while models load, not while running requests are
        finished before the end."""
        check_open(state)
        _check_alive(state)
        tests = {name: asdict(test) for name, test in state.self_tests.items()}
        return Ready(status="ready", self_tests=tests)

    @router.get("/version")
    async def version() -> Version:
        """The server's version."""
        return Version(version=__version__)

    @router.get("/metrics", response_class=Response)
    def metrics() -> Response:  # no coroutine: gauges ask the engines, which may take a moment
        """Prometheus metrics."""
        page, content_type = state.metrics.render()
        return Response(page, headers={"Content-Type": content_type})

    return router


def _check_alive(state: ServerState) -> None:
    dead = [f"'{name}': {reason}" for name, reason in state.failures().items()]
    if dead:
        raise unavailable(f"engines have failed: {'; '.join(dead)}", "engine_dead")
    hung = [
        f"'{name}' has work and has not come round for {seconds:.0f} s"
        for name, seconds in state.hung().items()
    ]
    if hung:
        limit = f"more than {state.settings.hang_timeout_s:g} s are not allowed (--hang-timeout)"
        raise unavailable(
            f"engines hang: {'; '.join(hung)}; {limit}. Where steps take that long, allow more",
            "engine_hung",
        )


def _card(state: ServerState, name: str) -> ModelCard:
    served = state.models.get(name)
    if served is None:  # a name that routes lead on
        return ModelCard(id=name, created=min(model.created for model in state.models.values()))
    engine = served.engine
    return ModelCard(
        id=name,
        created=served.created,
        root=name,
        max_model_len=engine.context,
        drafters=engine.drafters,
        num_draft_tokens=engine.config.get("num_draft_tokens"),
        lossless=engine.lossless,
        kind=served.kind,
    )


def _as_anthropic(card: ModelCard) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC).isoformat()
    return AnthropicModel(
        id=card.id, display_name=card.id, created_at=created, max_input_tokens=card.max_model_len
    )


async def _tokens(served: Served, body: TokenizeBody) -> list[int]:
    if body.messages is None:
        return await served.texts.encode(
            body.prompt or "", special=body.add_special_tokens is not False
        )
    if body.add_special_tokens:
        raise ApiError(
            "'add_special_tokens' means nothing with messages: the template writes them",
            param="add_special_tokens",
        )
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
    return await render(served, body.messages, body, tools=tools)
