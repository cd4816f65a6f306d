"""ShareGPT: recorded conversations with a chat model.

    {"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}

The first question becomes a request and the first answer its recorded answer; with `turns="all"` every question with an answer
does, with the conversation before it.
"""

from __future__ import annotations

from typing import Any

from outrider.lab.workload.formats.fields import Fields, Message, Turns, UnusableError, identity, optional_text
from outrider.lab.workload.types import WorkloadRequest

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "system": "system", "tool": "tool", "function_call": "assistant",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip


def read(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """One request of a conversation, or one of each question."""
    recorded = entry.get("conversations", entry.get("conversation"))
    if not isinstance(recorded, list) or not recorded:
        raise UnusableError("'conversations' must be a list of turns, got none")
    messages = [_message(number, turn) for number, turn in enumerate(recorded, 1)]
    asked = [index for index, message in enumerate(messages) if message["role"] == "user" and message["content"].strip()]
    if not asked:
        raise UnusableError("the conversation has no question: no turn is from 'human' or 'user'")
    name, task = identity(entry, "id"), optional_text(entry, "task") or "chat"
    if turns == "first":
        # what an answer says before the first question has nothing to do with it (long chats are split into parts)
        before = [message for message in messages[: asked[0]] if message["role"] == "system"]
        return [_request(name, task, [*before, messages[asked[0]]], messages[asked[0] + 1 :])]
    answered = [index for index in asked if index + 1 < len(messages) and messages[index + 1]["role"] == "assistant"]
    if not answered:
        raise UnusableError("no question of the conversation has an answer, so turns='all' finds nothing")
    return [
        _request(f"{name}/{number}" if name else "", task, messages[: index + 1], messages[index + 1 :])
        for number, index in enumerate(answered, 1)
    ]


def _request(name: str, task: str, messages: list[Message], after: list[Message]) -> WorkloadRequest:
    answer = after[0]["content"] if after and after[0]["role"] == "assistant" else None
    return WorkloadRequest(id=name, messages=tuple(messages), task=task, answer=answer)


def _message(number: int, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise UnusableError(f"turn {number} must be an object with 'from' and 'value'")
    speaker, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or speaker.lower() not in ROLES:
        raise UnusableError(f"turn {number} is from {str(speaker)[:20]!r}; expected one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise UnusableError(f"turn {number} has no text")
    return {"role": ROLES[speaker.lower()], "content": content}
