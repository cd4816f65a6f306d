"""The endpoints that generate: completions, chat completions, responses, and messages with the
count of their tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from outrider.serve.api.chat import Chat
from outrider.serve.api.completions import CompletionRequest
from outrider.serve.api.messages import EVENTS as MESSAGE_EVENTS
from outrider.serve.api.messages import Messages, count_tokens
from outrider.serve.api.responses import EVENTS as RESPONSE_EVENTS
from outrider.serve.api.responses import Responses
from outrider.serve.api.responses import count_tokens as count_input_tokens
from outrider.serve.api.sse import CHUNKS, EventStream, Framing, dumped, unless_gone
from outrider.serve.errors import ApiError
from outrider.serve.headers import ignored_fields
from outrider.serve.routing import served_named
from outrider.serve.schema.answers import (
    AnthropicError,
    ChatAnswer,
    CompletionAnswer,
    ErrorAnswer,
    InputTokens,
    TokenCount,
)
from outrider.serve.schema.anthropic import CountBody, MessagesBody
from outrider.serve.schema.chat import ChatBody
from outrider.serve.schema.completion import CompletionBody
from outrider.serve.schema.responses import InputTokensBody, ResponsesBody
from outrider.serve.served import ServerState

STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {
        "model": ErrorAnswer,
        "description": "A field is wrong, or asks for what this server cannot do.",
    },
    401: {"model": ErrorAnswer, "description": "No API key, or a wrong one."},
    404: {"model": ErrorAnswer, "description": "No such model."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    429: {
        "model": ErrorAnswer,
        "description": "The queue is full; Retry-After says when to try again.",
    },
    500: {"model": ErrorAnswer, "description": "The server failed."},
    503: {"model": ErrorAnswer, "description": "The server is loading or shutting down."},
}
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**about, "model": AnthropicError} for status, about in ERRORS.items()
}

QUESTION = "Why is the sky blue?"
CONVERSATION = [{"role": "user", "content": QUESTION}]


def example(body: dict[str, Any]) -> Any:
    """The body that /docs offers to send; it would make one up of every field that there is."""
    return Body(openapi_examples={"short": {"value": body}})


def generating_routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["generation"], responses=ERRORS)

    @router.post(
        "/v1/completions",
        responses={200: {"model": CompletionAnswer, "content": STREAM}},
        response_model=None,
    )
    async def completions(
        body: Annotated[CompletionBody, example({"prompt": "The sky is", "max_tokens": 32})],
        request: Request,
    ) -> Response:
        """Continue texts. With `stream`, server-sent events."""
        ignored_fields(request, state.ignored, body)
        return await _answer(
            await CompletionRequest.prepared(state, body), bool(body.stream), request
        )

    @router.post(
        "/v1/chat/completions",
        responses={200: {"model": ChatAnswer, "content": STREAM}},
        response_model=None,
    )
    async def chat_completions(
        body: Annotated[ChatBody, example({"messages": CONVERSATION, "max_tokens": 64})],
        request: Request,
    ) -> Response:
        """Answer a conversation. With `stream`, server-sent events."""
        ignored = ignored_fields(request, state.ignored, body)
        return await _answer(await Chat.prepared(state, body, ignored), bool(body.stream), request)

    @router.post("/v1/responses", responses={200: {"content": STREAM}}, response_model=None)
    async def responses(
        body: Annotated[ResponsesBody, example({"input": QUESTION, "max_output_tokens": 64})],
        request: Request,
    ) -> Response:
        """Answer a text or a conversation, which may continue from an earlier response. With `stream`,
        server-sent events."""
        ignored = ignored_fields(request, state.ignored, body)
        asked = await Responses.prepared(state, body, ignored)
        return await _answer(asked, bool(body.stream), request, RESPONSE_EVENTS)

    @router.post("/v1/responses/input_tokens")
    async def count_input(
        body: Annotated[InputTokensBody, example({"input": QUESTION})], request: Request
    ) -> InputTokens:
        """Tokens of what a response would answer."""
        ignored_fields(request, state.ignored, body)
        return InputTokens(input_tokens=await count_input_tokens(state, body))

    @router.get("/v1/responses/{response_id}", response_model=dict[str, Any])
    async def get_response(response_id: str, request: Request) -> Response:
        """A response that is kept, as it was answered."""
        _check_query(request)
        return _json(state.responses.find(response_id, to_go_on=False).response)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        """Forget a response."""
        state.responses.drop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post(
        "/v1/messages",
        responses={200: {"content": STREAM}, **ANTHROPIC_ERRORS},
        response_model=None,
    )
    async def messages(
        body: Annotated[MessagesBody, example({"messages": CONVERSATION, "max_tokens": 64})],
        request: Request,
    ) -> Response:
        """Answer a conversation, as Anthropic's clients ask. With `stream`, server-sent events."""
        ignored = ignored_fields(request, state.ignored, body)
        asked = await Messages.prepared(state, body, ignored)
        return await _answer(asked, bool(body.stream), request, MESSAGE_EVENTS)

    @router.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS)
    async def count_message(
        body: Annotated[CountBody, example({"messages": CONVERSATION})],
        request: Request,
    ) -> TokenCount:
        """Tokens of a conversation, as Anthropic's clients ask."""
        ignored_fields(request, state.ignored, body)
        return TokenCount(input_tokens=await count_tokens(served_named(state, body.model), body))

    return router


def _check_query(request: Request) -> None:
    """Raises ApiError for a parameter that would be ignored."""
    for sent in request.query_params:
        name = sent.removesuffix("[]")
        raise ApiError(
            f"'{name}' is not supported: what is kept is answered whole. Leave it out", param=name
        )


async def _answer(
    asked: CompletionRequest | Chat | Responses | Messages,
    stream: bool,
    request: Request,
    framing: Framing = CHUNKS,
) -> Response:
    request.state.asked = asked  # for the log of requests
    if stream:
        return EventStream(asked.chunks(), asked.cancel, framing, asked.marks)
    try:
        whole = await unless_gone(request.receive, asked.whole())
    finally:
        asked.cancel()
    return _json(whole)


def _json(content: dict[str, Any]) -> Response:
    return Response(dumped(content), media_type="application/json")
