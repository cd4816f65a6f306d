"""Which form one entry has, and the requests in it. Its fields decide, entry by entry: a file may mix forms.

`FORMATS` is a table of forms in the order in which they are tried; the first whose fields an entry has reads it. A field that
is null counts as absent. A form of your own is a `read` function and one line here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from outrider.lab.workload.formats import datasets, prompts, sharegpt
from outrider.lab.workload.formats.fields import Fields, Turns, UnusableError
from outrider.lab.workload.types import WorkloadRequest

Reader = Callable[[Fields, Turns], list[WorkloadRequest]]


@dataclass(frozen=True)
class Format:
    """One form of an entry."""

    name: str
    needs: tuple[str, ...]  # fields that an entry of this form has
    read: Reader  # requests without id get "" as their id


FORMATS = (
    Format("HumanEval", ("task_id", "prompt", "canonical_solution"), datasets.read_humaneval),
    Format("prompt", ("prompt",), prompts.read),
    Format("messages", ("messages",), prompts.read),
    Format("OpenAI batch request", ("body",), prompts.read_batch_request),
    Format("stored request", ("request",), prompts.read_stored),
    Format("OpenAI batch output", ("custom_id", "response"), prompts.refuse_batch_output),
    Format("ShareGPT", ("conversations",), sharegpt.read),
    Format("ShareGPT", ("conversation",), sharegpt.read),
    Format("Spec-Bench", ("turns",), datasets.read_spec_bench),
    Format("MATH", ("problem",), datasets.read_math),
    Format("GSM8K", ("question", "answer"), datasets.read_gsm8k),
)
_KEYS = sorted({key for form in FORMATS for key in form.needs})


def read_entry(value: Any, turns: Turns = "first") -> list[WorkloadRequest]:
    """The requests of one entry, mostly one. Raises UnusableError with the reason where there is none."""
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise UnusableError(f"{_kind(value)}, not an object with a field like 'prompt' or 'messages'")
    entry: Fields = {key: content for key, content in value.items() if content is not None}
    for form in FORMATS:
        if all(key in entry for key in form.needs):
            requests = form.read(entry, turns)
            for request in requests:
                _check_characters(request)
            return requests
    raise UnusableError(_no_prompt(entry))


def _no_prompt(entry: Fields) -> str:
    if not entry:
        return "an object without content"
    if "role" in entry and "content" in entry:
        return 'a single message; a conversation is {"messages": [message, message, ...]}'
    names = [str(key)[:40] for key in list(entry)[:8]]
    close = [known for name in names for known in difflib.get_close_matches(name, _KEYS, n=1, cutoff=0.8)]
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return f"no prompt: none of the known forms has the fields {', '.join(names)}{hint}"


def _check_characters(request: WorkloadRequest) -> None:
    """Text that is no Unicode would break tokenizers, terminals and result files, each in its own way."""
    for text in _texts(request):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            if 0xDC80 <= code <= 0xDCFF:  # how `surrogateescape` keeps a byte that is no UTF-8
                raise UnusableError(f"the byte 0x{code - 0xDC00:02x} is not UTF-8; convert the file, e.g. with iconv") from error
            raise UnusableError(f"\\u{code:04x} is half of a character (a lone surrogate)") from error


def _texts(request: WorkloadRequest) -> Iterator[str]:
    yield from filter(None, (request.id, request.prompt, request.task, request.reference, request.answer))
    for message in request.messages or ():
        yield from message.values()


def _kind(value: Any) -> str:
    names = {list: "a list", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
