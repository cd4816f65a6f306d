"""Our own form: `prompt` or `messages`, and what else is known about the request.

    {"prompt": "Question: ...\\nAnswer:", "id": "q1", "task": "reasoning", "reference": "18", "max_tokens": 200}
    {"messages": [{"role": "user", "content": "Hello"}], "answer": "Hi!"}

`answer`, `response` or `completion` is a model's answer. A conversation that ends with the assistant holds its answer (OpenAI's
files for fine-tuning are of this kind). Other fields are not looked at.
"""

from __future__ import annotations

from typing import Any

from outrider.lab.workload.formats.fields import (
    Fields,
    Turns,
    UnusableError,
    content_text,
    conversation,
    identity,
    optional_count,
    optional_text,
    prompt_text,
)
from outrider.lab.workload.types import WorkloadRequest

ANSWERS = ("answer", "response", "completion")
LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")


def read(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """One request. `turns` says nothing here: what is in `messages` is one question with its history."""
    if "prompt" in entry and "messages" in entry:
        raise UnusableError("both 'prompt' and 'messages': which of them is asked?")
    prompt, messages, answer = None, None, recorded_answer(entry)
    if "prompt" in entry:
        prompt = prompt_text(entry, "prompt")
    else:
        messages, reply = conversation(entry["messages"])
        answer = reply if answer is None else answer
    return [
        WorkloadRequest(
            id=identity(entry, "id", "request_id", "custom_id"),
            prompt=prompt,
            messages=messages,
            task=optional_text(entry, "task") or ("chat" if messages else "other"),
            reference=optional_text(entry, "reference"),
            answer=answer,
            max_tokens=optional_count(entry, *LIMITS),
        )
    ]


def recorded_answer(entry: Fields) -> str | None:
    """The model's answer: as text, or as a stored response of an OpenAI-compatible server."""
    for name in ANSWERS:
        if isinstance(entry.get(name), dict):
            return response_text(entry[name])
    return optional_text(entry, *ANSWERS)


def response_text(response: Fields) -> str | None:
    """The text of a chat completion, a completion or a batch's response; None where it failed or called a tool."""
    if isinstance(response.get("body"), dict):
        response = response["body"]
    choices = response.get("choices")
    choice: Any = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return None
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else choice.get("text")
    return None if content in (None, []) else content_text(content, "the recorded answer")
