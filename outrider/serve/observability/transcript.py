"""One HTTP exchange put together again: what was asked, and all answers, whether they came whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Decode = Callable[[str, list[int]], str]  # (model name, token ids) -> text
END = b"[DONE]"
RESPONSE_ENDS = {"completed": "stop", "incomplete": "length"}
Found = tuple["AnswerText", dict[str, Any], str]  # the answer, usage, id


@dataclass
class Transcript:
    """Feed it the bodies' bytes; `entries` when the answer is whole."""

    asked: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)

    def entries(
        self, decode: Decode, as_chat: dict[str, Any] | None = None
    ) -> Iterator[tuple[dict[str, Any], list[AnswerText], dict[str, Any], str]]:
        """(request with one prompt as text, its answers, usage, id), one per prompt; nothing where an answer did not end or
        none was asked for."""
        chunks = list(_objects(bytes(self.answered)))
        if as_chat is not None:
            answer, cost, identity = read_response(chunks) or read_message(chunks)
            if answer.finish_reason is not None:
                yield as_chat, [answer], cost, identity
            return
        body = json.loads(self.asked)
        usage: dict[str, Any] = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), {})
        answers = _answers(chunks)
        if not answers or body.get("max_tokens") == 0 or any(answer.finish_reason is None for answer in answers):
            return
        first = chunks[0]
        ids = body.pop("prompt_token_ids", None)
        asked = body.get("prompt") if ids is None else ids
        prompts = [None] if body.get("messages") else list(_prompts(asked, first.get("model", ""), decode))
        each = len(answers) // len(prompts)
        for number, prompt in enumerate(prompts):
            own = body if prompt is None else {**body, "prompt": prompt}
            own_answers = answers[number * each : (number + 1) * each]
            if prompt is not None and body.get("echo"):
                own_answers = [replace(one, text=(one.text or "").removeprefix(prompt)) for one in own_answers]
            name = first.get("id", "") + (f"-{number}" if len(prompts) > 1 else "")
            yield own, own_answers, usage if len(prompts) == 1 else {}, name


def _objects(content: bytes) -> Iterator[dict[str, Any]]:
    """The response itself, or the events of a stream."""
    if content.lstrip()[:1] == b"{":
        yield json.loads(content)
        return
    for line in content.splitlines():
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data and data != END:
            yield json.loads(data)


def _answers(chunks: list[dict[str, Any]]) -> list[AnswerText]:
    """By their index."""
    found: dict[int, AnswerText] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or []:
            answer = found.setdefault(choice.get("index", 0), AnswerText())
            text, thought = _text(choice), _part(choice).get("reasoning")
            if text is not None:
                answer.text = (answer.text or "") + text
            if thought is not None:
                answer.thought = (answer.thought or "") + thought
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return [found[index] for index in sorted(found)]


def _text(choice: Mapping[str, Any]) -> str | None:
    if "text" in choice:
        return choice["text"]
    return _part(choice).get("content")


def _part(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    return choice.get("message") or choice.get("delta") or {}


def _prompts(prompt: Any, model: str, decode: Decode) -> Iterator[str]:
    """OpenAI takes a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        yield prompt
    elif prompt and all(isinstance(token, int) for token in prompt):
        yield decode(model, prompt)
    else:
        for one in prompt:
            yield from _prompts(one, model, decode)


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
    answer = AnswerText(finish_reason=RESPONSE_ENDS.get(last["status"]))
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
