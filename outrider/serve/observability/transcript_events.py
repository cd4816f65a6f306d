"""Answers of /v1/responses and /v1/messages put together again, from the answer itself or from the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ENDS = {"completed": "stop", "incomplete": "length"}
Found = tuple["Said", dict[str, Any], str]  # the answer, usage, id


@dataclass
class Said:
    """One answer."""

    text: str | None = None  # None: nothing but tool calls
    thought: str | None = None
    finish_reason: str | None = None


def read_response(chunks: Sequence[dict[str, Any]]) -> Found | None:
    """A response, which the last event of a stream has whole; None where there is none."""
    last: dict[str, Any] = next((chunk.get("response", chunk) for chunk in reversed(chunks)), {})
    if last.get("object") != "response":
        return None
    said = Said(finish_reason=ENDS.get(last["status"]))
    for item in last["output"]:
        text = item["content"][0]["text"] if item.get("content") else None
        if item["type"] == "message":
            said.text = (said.text or "") + (text or "")
        elif item["type"] == "reasoning":
            said.thought = (said.thought or "") + (text or "")
    return said, last.get("usage") or {}, last["id"]


def read_message(chunks: Sequence[dict[str, Any]]) -> Found:
    """A message of Anthropic's interface."""
    said, usage, name = Said(), dict[str, Any](), ""
    for chunk in chunks:
        message = chunk.get("message", chunk)
        if message.get("type") == "message":
            name = message["id"]
        usage = chunk.get("usage") or usage
        said.finish_reason = message.get("stop_reason") or chunk.get("delta", {}).get("stop_reason") or said.finish_reason
        for part in [*message.get("content", ()), chunk.get("delta", {})]:
            if (text := part.get("text")) is not None:
                said.text = (said.text or "") + text
            if (thought := part.get("thinking")) is not None:
                said.thought = (said.thought or "") + thought
    return said, usage, name
