"""Our own form, `prompt` or `messages` and what else is known about the request; and what servers of OpenAI's interface read and
write.

    {"prompt": "Question: ...\\nAnswer:", "id": "q1", "task": "reasoning", "reference": "18", "max_tokens": 200}
    {"messages": [{"role": "user", "content": "Hello"}], "answer": "Hi!"}
    {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 200}}
    {"request": {"messages": [...]}, "response": {"choices": [{"message": {"content": "..."}}]}}

`answer`, `response` or `completion` is a model's answer. A conversation that ends with the assistant holds its answer (OpenAI's
files for fine-tuning are of this kind). Other fields are not looked at. The third is a line of a batch file, the fourth a request
stored with its response. In both, a request may be a chat completion (`messages`), a completion (`prompt`) or a response
(`input`, `instructions`). Tools are not part of the prompt here.
"""

from __future__ import annotations

from dataclasses import replace
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
GENERATING = ("/completions", "/responses")  # ends of the addresses that write text


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


def read_batch_request(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """A line of a batch's input file."""
    url = entry.get("url")
    if isinstance(url, str) and not url.rstrip("/").endswith(GENERATING):
        raise UnusableError(f"'{url[:60]}' does not generate text; only chat completions, completions and responses do")
    return [_request(entry, entry["body"])]


def read_stored(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """A request and, where one was recorded, its response."""
    asked = entry["request"]
    if isinstance(asked, dict) and isinstance(asked.get("body"), dict):
        asked = asked["body"]
    response = entry.get("response")
    if not isinstance(response, dict):
        return [_request(entry, asked, optional_text(entry, "response"))]
    found = _request(entry, asked, response_text(response))
    return [replace(found, id=found.id or identity(response, "id"))]


def refuse_batch_output(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """Answers without prompts."""
    raise UnusableError("a line of a batch's output: it has the answer but no prompt; give the batch's input file")


def _request(entry: Fields, asked: Any, answer: str | None = None) -> WorkloadRequest:
    if not isinstance(asked, dict):
        raise UnusableError("the request is no object with 'messages' or 'prompt'")
    asked = {key: value for key, value in asked.items() if value is not None}
    if "input" in asked and not {"messages", "prompt"} & set(asked):
        asked["messages"] = _response_input(asked)
    if not {"messages", "prompt"} & set(asked):
        raise UnusableError("the request has neither 'messages' nor 'prompt'")
    (found,) = read(asked, "first")
    return replace(
        found,
        id=identity(entry, "custom_id", "id", "request_id") or found.id,
        task=optional_text(entry, "task") or found.task,
        reference=optional_text(entry, "reference") or found.reference,
        answer=found.answer if answer is None else answer,
    )


def _response_input(asked: Fields) -> Any:
    """The Responses interface: `input` is a question or a list of messages, `instructions` the system's."""
    content, instructions = asked["input"], optional_text(asked, "instructions")
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if instructions and isinstance(messages, list):
        return [{"role": "system", "content": instructions}, *messages]
    return messages
