"""The output of a response, item by item, as the events that the openai package reads."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from outrider.serve.api.reply import Delta
from outrider.serve.schema.responses import InputItem

Event = dict[str, Any]
Item = dict[str, Any]
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


class Items:
    """Feed it the deltas of an answer. `output` has the items so far."""

    def __init__(self) -> None:
        self.output: list[Item] = []
        self._is_open = False

    def push(self, deltas: list[Delta]) -> Iterator[Event]:
        """Events for newly emitted text."""
        for delta in deltas:
            if thought := delta.get("reasoning"):
                yield from self._say("reasoning", thought)
            if text := delta.get("content"):
                yield from self._say("message", text)
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """Events that close the last item."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            yield self._event(
                f"response.{part['type']}.done",
                content_index=0,
                text=part["text"],
                **_no_logprobs(item["type"]),
            )
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        item["status"] = status
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.output) - 1,
            "item": item,
        }

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        if not self._is_open or self.output[-1]["type"] != kind:
            yield from self._begin_text(kind)
        part = self.output[-1]["content"][0]
        part["text"] += text
        yield self._event(
            f"response.{part['type']}.delta", content_index=0, delta=text, **_no_logprobs(kind)
        )

    def _begin_text(self, kind: str) -> Iterator[Event]:
        is_message = kind == "message"
        part: dict[str, Any] = {
            "type": "output_text" if is_message else "reasoning_text",
            "text": "",
        }
        if is_message:
            part |= {"annotations": [], "logprobs": []}
        about: dict[str, Any] = {"role": "assistant"} if is_message else {"summary": []}
        yield from self._begin({"type": kind, "id": item_id(kind), **about, "content": []})
        self.output[-1]["content"] = [part]
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            about = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._begin(
                {"type": "function_call", "id": item_id("function_call"), **about}
            )
        if arguments := function.get("arguments"):
            self.output[-1]["arguments"] += arguments
            yield self._event("response.function_call_arguments.delta", delta=arguments)

    def _begin(self, item: Item) -> Iterator[Event]:
        yield from self.end()
        item["status"] = "in_progress"
        self.output.append(item)
        self._is_open = True
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.output) - 1,
            "item": dict(item),
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        return {
            "type": kind,
            "item_id": self.output[-1]["id"],
            "output_index": len(self.output) - 1,
            **fields,
        }


def numbered() -> Callable[[Event], Event]:
    """Gives the events of a stream their numbers."""
    count = iter(range(1 << 62))
    return lambda event: {**event, "sequence_number": next(count)}


def _no_logprobs(kind: str) -> dict[str, Any]:
    """The fields that events about text share."""
    return {"logprobs": []} if kind == "message" else {}


def item_id(kind: str) -> str:
    """A new id for an item of that type."""
    return f"{PREFIXES[kind]}_{uuid.uuid4().hex}"


def listed(item: InputItem) -> Item:
    """An item of the input, as lists of a response's input have it and a later response reads it."""
    fields = {"id": item_id(item.type), "status": "completed", **item.model_dump(exclude_none=True)}
    if item.type == "reasoning":
        return {"summary": [], **fields}
    if item.type != "message":
        return fields
    kind = "output_text" if item.role == "assistant" else "input_text"
    parts = (
        [{"type": kind, "text": item.content}]
        if isinstance(item.content, str)
        else fields["content"]
    )
    more: Item = {"annotations": [], "logprobs": []}
    return {
        **fields,
        "content": [{**part, **(more if part["type"] == "output_text" else {})} for part in parts],
    }
