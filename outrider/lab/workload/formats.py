"""Which form one entry has, and the requests in it: docs/workloads.md lists the forms.

`FORMATS` is a table of forms in the order in which they are tried; the first whose fields an entry has reads it, so a file may
mix forms. A field that is null counts as absent. A form of your own is a `read` function and one line there.

Reasoning is asked as plain text, `Question: ...\\nAnswer:`, so that base models and chat models get the same. A request that
was sent to a server may be a chat completion (`messages`), a completion (`prompt`) or a response (`input`, `instructions`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from outrider.lab.workload.fields import (
    Fields,
    Message,
    Turns,
    UnusableError,
    content_text,
    conversation,
    identity,
    optional_count,
    optional_text,
    prompt_text,
)
from outrider.lab.workload.grade import boxed
from outrider.lab.workload.types import WorkloadRequest

MARK = "####"  # what GSM8K writes before a final answer
SPEC_BENCH_TASKS = {
    "translation": "translation", "summarization": "summarization", "qa": "qa", "math_reasoning": "reasoning", "rag": "rag",
}  # fmt: skip
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "system": "system", "tool": "tool", "function_call": "assistant",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
ANSWERS = ("answer", "response", "completion")
LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")
GENERATING = ("/completions", "/responses")  # ends of the addresses that write text
Reader = Callable[[Fields, Turns], list[WorkloadRequest]]


def question(text: str) -> str:
    """The prompt of a word problem."""
    return f"Question: {text.strip()}\nAnswer:"


def read_gsm8k(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """`question` and `answer`: a worked solution that ends in `#### N`; without the mark, a question with a short answer."""
    answer = optional_text(entry, "answer") or ""
    asked, reference = question(prompt_text(entry, "question")), after_mark(answer)
    name = identity(entry, "id")
    if reference is None:
        task = optional_text(entry, "task") or "qa"
        return [WorkloadRequest(id=name, prompt=asked, task=task, reference=answer.strip() or None)]
    return [WorkloadRequest(id=name, prompt=asked, task="reasoning", reference=reference)]


def read_math(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """`problem` and its `answer`, or a `solution` with the answer in a box."""
    reference = optional_text(entry, "answer") or boxed(optional_text(entry, "solution") or "")
    name = identity(entry, "id", "unique_id", "idx")
    return [WorkloadRequest(id=name, prompt=question(prompt_text(entry, "problem")), task="reasoning", reference=reference)]


def read_humaneval(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """The head of a function. No reference: whether code is right shows when it runs, and it is not run here."""
    return [WorkloadRequest(id=identity(entry, "task_id"), prompt=prompt_text(entry, "prompt"), task="code")]


def read_spec_bench(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """The first of `turns`. Only `math_reasoning` has references with one right answer."""
    asked = entry["turns"]
    if not isinstance(asked, list) or not asked:
        raise UnusableError("'turns' must be a list of questions, got none")
    first = prompt_text({"turns": asked[0]}, "turns")
    name, task = identity(entry, "question_id", "id"), SPEC_BENCH_TASKS.get(str(entry.get("category")), "chat")
    if task == "reasoning":
        solutions = entry.get("reference")
        solution = solutions[0] if isinstance(solutions, list) and solutions else solutions
        reference = after_mark(solution) if isinstance(solution, str) else None
        return [WorkloadRequest(id=name, prompt=question(first), task=task, reference=reference)]
    return [WorkloadRequest(id=name, messages=({"role": "user", "content": first},), task=task)]


def after_mark(solution: str) -> str | None:
    """What stands behind the last `####` of a worked solution."""
    _, mark, answer = solution.rpartition(MARK)
    return answer.strip() or None if mark else None


def read_sharegpt(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
    """One request of a conversation, or one of each question."""
    recorded = entry.get("conversations", entry.get("conversation"))
    if not isinstance(recorded, list) or not recorded:
        raise UnusableError("'conversations' must be a list of turns, got none")
    messages = [_turn(number, turn) for number, turn in enumerate(recorded, 1)]
    asked = [index for index, message in enumerate(messages) if message["role"] == "user" and message["content"].strip()]
    if not asked:
        raise UnusableError("the conversation has no question: no turn is from 'human' or 'user'")
    name, task = identity(entry, "id"), optional_text(entry, "task") or "chat"
    if turns == "first":
        # what an answer says before the first question has nothing to do with it (long chats are split into parts)
        before = [message for message in messages[: asked[0]] if message["role"] == "system"]
        return [_asked(name, task, [*before, messages[asked[0]]], messages[asked[0] + 1 :])]
    answered = [index for index in asked if index + 1 < len(messages) and messages[index + 1]["role"] == "assistant"]
    if not answered:
        raise UnusableError("no question of the conversation has an answer, so turns='all' finds nothing")
    return [
        _asked(f"{name}/{number}" if name else "", task, messages[: index + 1], messages[index + 1 :])
        for number, index in enumerate(answered, 1)
    ]


def _asked(name: str, task: str, messages: list[Message], after: list[Message]) -> WorkloadRequest:
    answer = after[0]["content"] if after and after[0]["role"] == "assistant" else None
    return WorkloadRequest(id=name, messages=tuple(messages), task=task, answer=answer)


def _turn(number: int, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise UnusableError(f"turn {number} must be an object with 'from' and 'value'")
    speaker, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or speaker.lower() not in ROLES:
        raise UnusableError(f"turn {number} is from {str(speaker)[:20]!r}; expected one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise UnusableError(f"turn {number} has no text")
    return {"role": ROLES[speaker.lower()], "content": content}


def read_own(entry: Fields, turns: Turns) -> list[WorkloadRequest]:
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
    (found,) = read_own(asked, "first")
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


@dataclass(frozen=True)
class Format:
    """One form of an entry."""

    name: str
    needs: tuple[str, ...]  # fields that an entry of this form has
    read: Reader  # requests without id get "" as their id


FORMATS = (
    Format("HumanEval", ("task_id", "prompt", "canonical_solution"), read_humaneval),
    Format("prompt", ("prompt",), read_own),
    Format("messages", ("messages",), read_own),
    Format("OpenAI batch request", ("body",), read_batch_request),
    Format("stored request", ("request",), read_stored),
    Format("OpenAI batch output", ("custom_id", "response"), refuse_batch_output),
    Format("ShareGPT", ("conversations",), read_sharegpt),
    Format("ShareGPT", ("conversation",), read_sharegpt),
    Format("Spec-Bench", ("turns",), read_spec_bench),
    Format("MATH", ("problem",), read_math),
    Format("GSM8K", ("question", "answer"), read_gsm8k),
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
