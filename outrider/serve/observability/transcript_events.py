"""Answers of /v1/responses and /v1/messages put together again, from the answer itself or from the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ENDS = {"completed": "stop", "incomplete": "length"}
Found = tuple["AnswerText", dict[str, Any], str]  # the answer, usage, id


@dataclass
class AnswerText:
    """One answer."""

    text: str | None = None  # None: nothing but tool calls
    thought: str | None = None
    finish_reason: str | None = None


def read_response(chunks: Sequence[dict[str, Any]]) -> Found | None:
    """A response, which the last event of a stream has whole; None where there is none."""
    last: dict[str, Any] = next((chunk.get("response", chunk) for chunk in reversed(chunks)), {})
    if last.get("object") != "response":
        return None
    answer = AnswerText(finish_reason=ENDS.get(last["status"]))
    for item in last["output"]:
        text = item["content"][0]["text"] if item.get("content") else None
        if item["type"] == "message":
            answer.text = (answer.text or "") + (text or "")
        elif item["type"] == "reasoning":
            answer.thought = (answer.thought or "") + (text or "")
    return answer, last.get("usage") or {}, last["id"]


def read_message(chunks: Sequence[dict[str, Any]]) -> Found:
    """A message of Anthropic's interface."""
    answer, usage, name = AnswerText(), dict[str, Any](), ""
    for chunk in chunks:
        message = chunk.get("message", chunk)
        if message.get("type") == "message":
            name = message["id"]
        usage = chunk.get("usage") or usage
        answer.finish_reason = message.get("stop_reason") or chunk.get("delta", {}).get("stop_reason") or answer.finish_reason
        for part in [*message.get("content", ()), chunk.get("delta", {})]:
            if (text := part.get("text")) is not None:
                answer.text = (answer.text or "") + text
            if (thought := part.get("thinking")) is not None:
                answer.thought = (answer.thought or "") + thought
    return answer, usage, name
