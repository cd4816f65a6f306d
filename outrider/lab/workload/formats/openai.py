"""What servers of OpenAI's interface read and write.

    {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 200}}
    {"request": {"messages": [...]}, "response": {"choices": [{"message": {"content": "..."}}]}}

The first is a line of a batch file, the second a request stored with its response. In both, a request may be a chat
completion (`messages`), a completion (`prompt`) or a response (`input`, `instructions`). Tools are not part of the prompt here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.lab.workload.formats import prompts
from outrider.lab.workload.formats.fields import Fields, Turns, UnusableError, identity, optional_text
from outrider.lab.workload.types import WorkloadRequest

GENERATING = ("/completions", "/responses")  # ends of the addresses that write text


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
    found = _request(entry, asked, prompts.response_text(response))
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
    (found,) = prompts.read(asked, "first")
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
