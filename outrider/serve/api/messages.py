"""/v1/messages: Anthropic's interface to the same conversations, whole or as a stream of its
events."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from outrider.engine.request import Update
from outrider.serve.api.dialogue import Answering, Dialogue, Interface, num_prompt_tokens
from outrider.serve.api.from_anthropic import NAMES, THOUGHT, chat_of, place_of
from outrider.serve.api.reply import Delta
from outrider.serve.api.sse import Framing
from outrider.serve.errors import ApiError
from outrider.serve.headers import IgnoredFields
from outrider.serve.schema.anthropic import CountBody, MessagesBody
from outrider.serve.served import Served, ServerState
from outrider.wellformed import parsed_json

EVENTS = Framing(has_names=True, end=None, error=ApiError.anthropic_body)
INTERFACE = Interface("msg", THOUGHT, usual_effort="high", names=NAMES)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
Event = dict[str, Any]


async def count_tokens(served: Served, body: CountBody) -> int:
    """Tokens of a conversation as the model reads it. Raises ApiError where it cannot be rendered."""
    with INTERFACE.words(partial(place_of, body=body)):
        return await num_prompt_tokens(served, chat_of(body), INTERFACE)


class Messages(Answering):
    """One request to the endpoint. Make it with `prepared`; then either `whole` or `chunks`."""

    def __init__(self, dialogue: Dialogue) -> None:
        super().__init__(dialogue)
        self._id = dialogue.exchange.id.replace("-", "_")
        self._blocks = ContentEvents()

    @classmethod
    async def prepared(
        cls, state: ServerState, body: MessagesBody, ignored: IgnoredFields
    ) -> Messages:
        """Route it, render the conversation, check everything. Raises ApiError or ConfigError."""
        with INTERFACE.words(partial(place_of, body=body)):
            return cls(await Dialogue.prepared(state, chat_of(body), ignored, INTERFACE))

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        [answer] = await self._dialogue.exchange.answers()
        for _ in [*self._blocks.push(self._dialogue.replies[0].push(answer)), *self._blocks.end()]:
            pass
        bill = self._dialogue.bill()
        return {**self._head(), "content": self._blocks.finished, **self._ending(), **_usage(bill)}

    async def _chunks(
        self, updates: AsyncGenerator[tuple[int, Update], None]
    ) -> AsyncGenerator[Event, None]:
        prompt = len(self._dialogue.exchange.prompts[0])
        # what of it is cached is known at the end
        usage = {"input_tokens": prompt, "output_tokens": 0}
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield {"type": "message_start", "message": message}
        async with aclosing(updates):
            async for _, update in updates:
                for event in self._blocks.push(self._dialogue.replies[0].push(update)):
                    yield event
        for event in self._blocks.end():
            yield event
        yield {"type": "message_delta", "delta": self._ending(), **_usage(self._dialogue.bill())}
        yield {"type": "message_stop"}

    def _head(self) -> dict[str, Any]:
        exchange = self._dialogue.exchange
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": exchange.served.name,
        }

    def _ending(self) -> dict[str, Any]:
        reply = self._dialogue.replies[0]
        named = (
            reply.stop_reason
            if isinstance(reply.stop_reason, str) and reply.finish_reason == "stop"
            else None
        )
        reason = "stop_sequence" if named else STOP_REASONS[reply.finish_reason or "stop"]
        # OpenAI's word for a call that had to be is "stop", too
        calls = self._blocks.has_calls and reason == "end_turn"
        return {"stop_reason": "tool_use" if calls else reason, "stop_sequence": named}


class ContentEvents:
    """The content of a message, block by block, as events."""

    def __init__(self) -> None:
        self.finished: list[dict[str, Any]] = []  # whole once the next one has begun, or at the end
        self._input = ""  # JSON of the tool's input that is being written
        self._is_open = False
        self.has_calls = False  # and they are whole

    def push(self, deltas: list[Delta]) -> Iterator[Event]:
        """Events for newly emitted text."""
        for delta in deltas:
            if thought := delta.get("reasoning"):
                yield from self._grow(
                    {"type": "thinking", "thinking": "", "signature": ""}, "thinking", thought
                )
            if text := delta.get("content"):
                yield from self._grow({"type": "text", "text": ""}, "text", text)
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)

    def end(self) -> Iterator[Event]:
        """Events that close the last block."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.finished[-1]
        if block["type"] == "thinking":
            # clients want one; nobody checks it
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        if block["type"] == "tool_use":
            arguments = _object(self._input)
            self.has_calls = arguments is not None
            block["input"] = arguments or {}
        yield {"type": "content_block_stop", "index": len(self.finished) - 1}

    def _grow(self, empty: dict[str, Any], field: str, text: str) -> Iterator[Event]:
        if not self._is_open or self.finished[-1]["type"] != empty["type"]:
            yield from self._begin(empty)
        self.finished[-1][field] += text
        yield self._delta({"type": f"{field}_delta", field: text})

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            yield from self._begin(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            )
            self._input = ""
        if arguments := function.get("arguments"):
            self._input += arguments
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.end()
        self.finished.append(dict(block))
        self._is_open = True
        yield {
            "type": "content_block_start",
            "index": len(self.finished) - 1,
            "content_block": block,
        }

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.finished) - 1, "delta": delta}


def _object(text: str) -> dict[str, Any] | None:
    """A tool's input; None where it broke off."""
    try:
        value = parsed_json(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _usage(bill: dict[str, Any]) -> dict[str, Any]:
    usage = bill["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    details = usage.get("completion_tokens_details", {})
    thought = details.get("reasoning_tokens")
    return {
        "usage": {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            **({} if thought is None else {"output_tokens_details": {"thinking_tokens": thought}}),
        },
        "metrics": bill["metrics"],
    }
