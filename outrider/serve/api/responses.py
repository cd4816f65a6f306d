"""/v1/responses: OpenAI's newer interface to the same conversations, whole or as a stream of its
events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from outrider.engine.request import Update
from outrider.errors import OutriderError
from outrider.serve.api.dialogue import (
    Answering,
    Dialogue,
    Interface,
    num_prompt_tokens,
    shows_thoughts,
)
from outrider.serve.api.from_responses import NAMES, THOUGHT, chat_of, items_of, place_of
from outrider.serve.api.response_items import Event, Items, listed, numbered
from outrider.serve.api.response_store import ResponseStore, Stored
from outrider.serve.api.sse import Framing
from outrider.serve.errors import ApiError, as_api_error
from outrider.serve.headers import IgnoredFields
from outrider.serve.routing import served_named
from outrider.serve.schema.base import made
from outrider.serve.schema.responses import InputItem, InputTokensBody, ResponsesBody
from outrider.serve.served import ServerState


def _failure(error: ApiError) -> Event:
    return {
        "type": "error",
        "code": error.code,
        "message": str(error),
        "param": error.param,
        "sequence_number": 0,
    }


INTERFACE = Interface("resp", THOUGHT, names=NAMES)
EVENTS = Framing(has_names=True, end=None, error=_failure)


async def count_tokens(state: ServerState, body: InputTokensBody) -> int:
    """Tokens of a conversation as the model reads it. Raises ApiError where it cannot be rendered."""
    whole = made(ResponsesBody, body.model_dump(by_alias=True, exclude_none=True))
    asked = items_of(whole, state.responses)
    with INTERFACE.words(partial(place_of, asked=asked)):
        chat = chat_of(whole, [*_earlier(before_of(state, whole)), *asked])
        return await num_prompt_tokens(served_named(state, body.model), chat, INTERFACE)


def before_of(state: ServerState, body: ResponsesBody) -> Stored | None:
    """The response that a body continues from. Raises ApiError for one that is not here."""
    return (
        None
        if body.previous_response_id is None
        else state.responses.find(body.previous_response_id)
    )


def _earlier(before: Stored | None) -> list[InputItem]:
    return (
        [] if before is None else [InputItem.model_validate(item) for item in before.conversation()]
    )


class Responses(Answering):
    """One request to the endpoint. Make it with `prepared`; then either `whole` or `chunks`."""

    def __init__(
        self,
        body: ResponsesBody,
        asked: Sequence[InputItem],
        dialogue: Dialogue,
        store: ResponseStore,
        before: Stored | None,
    ) -> None:
        super().__init__(dialogue)
        self._body = body
        self._asked = asked
        self._store = store
        self._before = before
        self._items = Items()
        self._id = dialogue.exchange.id.replace("-", "_")

    @classmethod
    async def prepared(
        cls, state: ServerState, body: ResponsesBody, ignored: IgnoredFields
    ) -> Responses:
        """Find what it continues from, route it, render the conversation, check everything. Raises
        ApiError or ConfigError."""
        before = before_of(state, body)
        asked = items_of(body, state.responses)
        with INTERFACE.words(partial(place_of, asked=asked)):
            chat = chat_of(body, [*_earlier(before), *asked])
            dialogue = await Dialogue.prepared(state, chat, ignored, INTERFACE)
        return cls(body, asked, dialogue, state.responses, before)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        [answer] = await self._dialogue.exchange.answers()
        for _ in self._items.push(self._dialogue.replies[0].push(answer)):
            pass
        for _ in self._items.end(self._status):
            pass
        return self._ended()

    async def _chunks(
        self, updates: AsyncGenerator[tuple[int, Update], None]
    ) -> AsyncGenerator[Event, None]:
        number = numbered()
        begun = self._response("in_progress")
        yield number({"type": "response.created", "response": begun})
        yield number({"type": "response.in_progress", "response": begun})
        try:
            async with aclosing(updates):
                async for _, update in updates:
                    for event in self._items.push(self._dialogue.replies[0].push(update)):
                        yield number(event)
        except OutriderError as error:
            failure = as_api_error(error)
            failed = self._response("failed") | {
                "error": {"code": "server_error", "message": str(failure)}
            }
            yield number({"type": "response.failed", "response": failed})
            return
        for event in self._items.end(self._status):
            yield number(event)
        yield number({"type": f"response.{self._status}", "response": self._ended()})

    @property
    def _status(self) -> str:
        return "incomplete" if self._dialogue.replies[0].finish_reason == "length" else "completed"

    def _ended(self) -> dict[str, Any]:
        """The whole response, kept for later requests that read or continue it."""
        bill = self._dialogue.bill()
        details = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        more = {
            "incomplete_details": details,
            "usage": _usage(bill["usage"]),
            "metrics": bill["metrics"],
        }
        response = {**self._response(self._status), **more}
        if self._body.store is not False:
            # by the chat template, in later turns
            shown = shows_thoughts(self._dialogue.exchange.served)
            own_output = [
                item for item in self._items.output if shown or item["type"] != "reasoning"
            ]
            self._store.keep(
                self._id, [listed(item) for item in self._asked], own_output, response, self._before
            )
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        exchange = self._dialogue.exchange
        params = exchange.requests[0].params
        choice = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": exchange.created,
            "status": status,
            "model": exchange.served.name,
            "output": self._items.output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "background": False,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "store": body.store is not False,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "text": {"format": _format(body)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [
                {"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)}
                for tool in body.tools or []
            ],
        }


def _format(body: ResponsesBody) -> dict[str, Any]:
    form = None if body.text is None else body.text.format
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
