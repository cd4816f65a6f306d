"""One stream of completion chunks, event by event: text, arrival times, token counts.

Both OpenAI endpoints at once: a choice has `text` or `delta`; reasoning comes as `reasoning_content` (SGLang, llama.cpp,
DeepSeek), as `reasoning` (vLLM), or as both (ours). Nothing here reads a socket, so a test can play any stream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

END = "[DONE]"
GIVEN_UP = ("abort", "error")  # reasons that vLLM and SGLang end a request with that they could not finish
SHOWN = 80  # characters of a bad event in a message
REASONING = ("reasoning_content", "reasoning")  # two names of one text


class BadStreamError(Exception):
    """The server sent something that is no chunk (`kind` malformed), or reported that it failed (aborted)."""

    def __init__(self, message: str, kind: str = "malformed", status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status  # of HTTP, where an error names one: vLLM refuses some parameters only after it has answered 200


@dataclass
class Stream:
    """What has arrived so far. Times are the caller's seconds since the request was sent."""

    texts: list[str] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)
    seconds: float = 0.0  # arrival of the last event that belongs to the text
    finish_reason: str | None = None
    ended: bool = False  # the end mark has come
    _usage: dict[str, Any] = field(default_factory=dict)
    _timings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """A stream without end mark counts when the server gave a reason to stop: some leave the mark out."""
        return self.ended or self.finish_reason is not None

    @property
    def num_tokens(self) -> int | None:
        """Tokens as the server counted them: `usage`, or llama.cpp's `timings`."""
        return _count(self._usage.get("completion_tokens"), self._timings.get("predicted_n"))

    @property
    def num_prompt_tokens(self) -> int | None:
        return _count(self._usage.get("prompt_tokens"))

    @property
    def num_cached_tokens(self) -> int | None:
        details = self._usage.get("prompt_tokens_details")
        return _count(details.get("cached_tokens") if isinstance(details, dict) else None, self._timings.get("cache_n"))

    def feed(self, data: str, now: float, event: str = "message") -> None:
        """The data of one event. Raises BadStreamError."""
        if not data.strip():
            return  # a heartbeat
        if data.strip() == END:
            self.ended = True
            return
        chunk = _object(data)
        if chunk.get("error") or event == "error":
            message = f"the server reported an error in the stream: {error_text(chunk)}"
            raise BadStreamError(message, "aborted", _status(chunk.get("error")))
        self._take(_first_choice(chunk), now)
        self._usage |= _dictionary(chunk, "usage")
        self._timings |= _dictionary(chunk, "timings")

    def _take(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") if isinstance(choice.get("delta"), dict) else {}
        assert delta is not None
        thought = next((delta[name] for name in REASONING if delta.get(name)), None)
        parts = [choice.get("text"), thought, delta.get("content")]
        text = "".join(part for part in parts if isinstance(part, str))
        if text:
            self.texts.append(text)
            self.chunks_s.append(now)
        if isinstance(reason := choice.get("finish_reason"), str):
            if reason in GIVEN_UP:
                raise BadStreamError(f"the server gave the request up (finish_reason '{reason}')", "aborted")
            self.finish_reason = reason
        if text or reason:
            self.seconds = now


def error_text(body: Any) -> str:
    """The message in an error body: OpenAI's {"error": {"message"}}, vLLM's older {"message"}, FastAPI's {"detail"}."""
    while isinstance(body, dict):
        found = next((body[name] for name in ("error", "message", "detail", "msg") if body.get(name)), None)
        if found is None:
            break
        body = found
    if isinstance(body, list) and body:
        return error_text(body[0])
    return one_line(body if isinstance(body, str) else json.dumps(body))


def one_line(text: str, limit: int = 300) -> str:
    """White space collapsed, cut with an ellipsis."""
    text = " ".join(mended(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def mended(text: str) -> str:
    """Pairs of surrogates that JSON escapes brought apart joined, single ones replaced: no file takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _object(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadStreamError(f"an event of the stream is not JSON: {one_line(data, SHOWN)}") from error
    if not isinstance(chunk, dict):
        raise BadStreamError(f"an event of the stream is no JSON object: {one_line(data, SHOWN)}")
    return chunk


def _first_choice(chunk: dict[str, Any]) -> dict[str, Any]:
    """Empty for a chunk without choices (usage), as one answer is asked for."""
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BadStreamError(f"an event of the stream has choices that are no list of objects: {one_line(str(choices), SHOWN)}")
    return choices[0] if choices else {}


def _status(error: Any) -> int | None:
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code < 600 else None


def _dictionary(chunk: dict[str, Any], name: str) -> dict[str, Any]:
    value = chunk.get(name)
    return value if isinstance(value, dict) else {}


def _count(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0), None)
