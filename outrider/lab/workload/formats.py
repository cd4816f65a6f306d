"""Which form one entry of a file has, and the requests in it: docs/workloads.md lists the forms.

The first form whose field an entry has reads it, so a file may mix forms. A field that is null
counts as absent. Word problems are asked as plain text, `Question: ...\\nAnswer:`, so that base
models and chat models get the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from outrider.errors import did_you_mean
from outrider.lab.workload.types import Turns, WorkloadRequest
from outrider.wellformed import is_text

Entry = dict[str, Any]
MARK = "####"  # what GSM8K writes before a final answer
BOX = re.compile(r"\\boxed\{([^{}]+)\}")
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "rag")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
PREPARE = (
    "python prepare_data.py --dataset speed --config all (NVIDIA Model-Optimizer, specdec_bench)"
)
LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")


class UnusableError(Exception):
    """An entry that is no request; the message says why."""


def read_entry(value: Any, turns: Turns = "auto") -> list[WorkloadRequest]:
    """The requests of one entry, mostly one, "" as the id of those that have none. Raises
    UnusableError with the reason."""
    if not isinstance(value, dict):
        raise UnusableError("not an object with a field like 'prompt' or 'messages'")
    entry = {name: content for name, content in value.items() if content is not None}
    form = next((name for name in FORMS if name in entry), None)
    if form is None:
        names = [str(name)[:40] for name in list(entry)[:8]]
        hint = did_you_mean(names[0], FORMS) if names else ""
        raise UnusableError(f"no prompt: no known form has the fields {', '.join(names)}.{hint}")
    requests = FORMS[form](entry, turns)
    for request in requests:
        messages = [text for message in request.messages or () for text in message.values()]
        for text in (
            request.id,
            request.prompt,
            request.task,
            request.reference,
            request.answer,
            *messages,
            *request.later,
        ):
            if text is not None and not is_text(text):
                raise UnusableError(
                    "it has bytes that are not UTF-8, or half of a character; convert the file, "
                    "e.g. with iconv"
                )
    return requests


def _text(entry: Entry, *names: str) -> str | None:
    """The first of these fields that is there, as text: ids and answers are often written as
    numbers."""
    value = next((entry[name] for name in names if name in entry), None)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise UnusableError(f"'{names[0]}' must be text")


def _asked(entry: Entry, name: str) -> str:
    """A field that is asked of the model."""
    value = entry.get(name)
    if not isinstance(value, str):
        raise UnusableError(f"'{name}' must be text")
    if not value.strip():
        raise UnusableError(f"'{name}' is empty")
    return value


def _question(text: str) -> str:
    return f"Question: {text.strip()}\nAnswer:"


def _after_mark(solution: Any) -> str | None:
    """The text after the last #### of a worked solution."""
    _, mark, answer = str(solution).rpartition(MARK)
    return answer.strip() or None if mark else None


# ---------------------------------------------------------------- ours, and logs in OpenAI's form


def _own(entry: Entry, turns: Turns) -> list[WorkloadRequest]:
    """A prompt, or a conversation whose last turn may be the recorded answer."""
    if "prompt_id" in entry and isinstance(entry.get("prompt"), list):  # of mt_bench_prompts
        return [conversation_of(entry["prompt"], entry, turns, field="prompt")]
    if "prompt" in entry and "messages" in entry:
        raise UnusableError("both 'prompt' and 'messages': which of them is asked?")
    messages = None
    answer = None
    prompt = _asked(entry, "prompt") if "prompt" in entry else None
    if prompt is None:
        messages, answer = _conversation(entry["messages"])
    recorded = entry.get("response")
    limit = next((entry[name] for name in LIMITS if name in entry), None)
    if limit is not None and not (
        isinstance(limit, int | float) and limit >= 1 and limit == int(limit)
    ):
        raise UnusableError("'max_tokens' must be a whole number of at least 1")
    return [
        WorkloadRequest(
            id=_text(entry, "id", "request_id", "custom_id") or "",
            prompt=prompt,
            messages=messages,
            task=_text(entry, "task")
            or ("code" if "canonical_solution" in entry else "chat" if messages else "other"),
            reference=_text(entry, "reference"),
            answer=_response_text(recorded)
            if isinstance(recorded, dict)
            else _text(entry, "answer", "response") or answer,
            max_tokens=None if limit is None else int(limit),
        )
    ]


def _logged(entry: Entry, turns: Turns) -> list[WorkloadRequest]:
    """A request as it was sent, or a line of a batch's input; and where one was recorded, its
    response."""
    asked = entry.get("request", entry.get("body"))
    if isinstance(asked, dict) and isinstance(asked.get("body"), dict):
        asked = asked["body"]
    if not isinstance(asked, dict):
        raise UnusableError("the request is no object with 'messages' or 'prompt'")
    asked = {str(name): content for name, content in asked.items() if content is not None}
    # the Responses interface: a question or a list of messages, and the system's instructions
    if "input" in asked:
        given = asked["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        system = (
            [{"role": "system", "content": asked["instructions"]}]
            if "instructions" in asked
            else []
        )
        asked["messages"] = [*system, *messages] if isinstance(messages, list) else messages
    if not {"messages", "prompt"} & set(asked):
        raise UnusableError("the request has neither 'messages' nor 'prompt'")
    outer: Entry = {
        name: entry[name]
        for name in ("id", "custom_id", "task", "reference", "response")
        if name in entry
    }
    return _own({**asked, **outer}, turns)


def _response_text(response: Entry) -> str | None:
    """The text of a chat completion, a completion or a batch's response; None where it failed or
    called a tool."""
    response = response.get("body") or response
    try:
        choice = response["choices"][0]
        content = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None


def _conversation(value: Any) -> tuple[tuple[dict[str, str], ...], str | None]:
    """Messages up to the last question, and the recorded answer where the conversation continues
    with one."""
    if not isinstance(value, list) or not value:
        raise UnusableError("'messages' must be a list of messages")
    messages = [_message(number, message) for number, message in enumerate(value, 1)]
    answer = (
        messages.pop()["content"]
        if len(messages) > 1 and messages[-1]["role"] == "assistant"
        else None
    )
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        raise UnusableError(
            f"the conversation ends with the role '{last['role']}'; the last word must be the "
            "user's"
        )
    if not last["content"].strip():
        raise UnusableError(f"the last message, of the role '{last['role']}', is empty")
    return tuple(messages), answer


def _message(number: int, message: Any) -> dict[str, str]:
    """One turn, in OpenAI's or in ShareGPT's spelling; a list of parts must be all text."""
    if not isinstance(message, dict):
        raise UnusableError(f"message {number} must be an object with 'role' and 'content'")
    role = str(message.get("role", message.get("from"))).lower()
    role = ROLES.get(role, role)
    if role not in KNOWN_ROLES:
        raise UnusableError(
            f"message {number} has the role '{role[:20]}'; expected one of {', '.join(KNOWN_ROLES)}"
        )
    content = message.get("content", message.get("value"))
    if isinstance(content, list) and content:
        texts = [
            part["text"]
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise UnusableError(
            f"message {number} ({role}) has no text, or parts that are no text; only text can be "
            "asked here"
        )
    return {"role": role, "content": content}


# ---------------------------------------------------------------- ShareGPT, and benchmarks


def _sharegpt(entry: Entry, turns: Turns) -> list[WorkloadRequest]:
    """One request of a conversation, or one of each answered question."""
    recorded = entry["conversations"]
    if not isinstance(recorded, list) or not recorded:
        raise UnusableError("'conversations' must be a list of turns")
    messages = [_message(number, turn) for number, turn in enumerate(recorded, 1)]
    asked = [
        at
        for at, message in enumerate(messages)
        if message["role"] == "user" and message["content"].strip()
    ]
    if not asked:
        raise UnusableError("the conversation has no question: no turn is from 'human' or 'user'")
    name = _text(entry, "id") or ""
    task = _text(entry, "task") or "chat"
    after = {at: messages[at + 1] for at in asked if at + 1 < len(messages)}
    answers = {
        at: message["content"] for at, message in after.items() if message["role"] == "assistant"
    }
    # answers before the first question have nothing to do with it: long chats are split into parts
    if turns != "all":
        first = asked[0]
        before = [message for message in messages[:first] if message["role"] == "system"]
        return [
            WorkloadRequest(
                name, messages=(*before, messages[first]), task=task, answer=answers.get(first)
            )
        ]
    if not answers:
        raise UnusableError(
            "no question of the conversation has an answer, so turns='all' finds nothing"
        )
    return [
        WorkloadRequest(
            f"{name}/{number}" if name else "",
            messages=tuple(messages[: at + 1]),
            task=task,
            answer=answer,
            turn=number,
        )
        for number, (at, answer) in enumerate(answers.items(), 1)
    ]


def _humaneval(entry: Entry, turns: Turns) -> list[WorkloadRequest]:
    """The head of a function. No reference: whether code is right shows when it runs, and it is not
    run here."""
    return [WorkloadRequest(_text(entry, "task_id") or "", _asked(entry, "prompt"), task="code")]


def _gsm8k(entry: Entry, turns: Turns) -> list[WorkloadRequest]:
    """A worked solution that ends in `#### N`; without the mark, a question with a short answer."""
    answer = _text(entry, "answer") or ""
    reference = _after_mark(answer)
    task = "qa" if reference is None else "reasoning"
    prompt = _question(_asked(entry, "question"))
    return [
        WorkloadRequest(
            _text(entry, "id") or "",
            prompt,
            task=task,
            reference=reference or answer.strip() or None,
        )
    ]


def _math(entry: Entry, turns: Turns) -> list[WorkloadRequest]:
    """A competition problem, and its answer: a field of its own, or a plain one in the box that the
    solution ends with."""
    prompt = _question(_asked(entry, "problem"))
    name = _text(entry, "id", "unique_id", "idx") or ""
    boxes = BOX.findall(_text(entry, "solution") or "")
    reference = _text(entry, "answer") or (boxes[-1] if boxes else None)
    return [WorkloadRequest(name, prompt, task="reasoning", reference=reference)]


def _spec_bench(entry: Entry, turns: Turns) -> list[WorkloadRequest]:
    """The questions in `turns`. Word problems are one question with a right answer."""
    category = str(entry.get("category"))
    if category == "math_reasoning":
        first, *_ = _questions(entry["turns"], "turns")
        solutions = entry.get("reference")
        reference = _after_mark(
            solutions[0] if isinstance(solutions, list) and solutions else solutions
        )
        name = _name(entry)
        return [WorkloadRequest(name, _question(first), task="reasoning", reference=reference)]
    task = category if category in SPEC_BENCH_TASKS else "chat"
    return [conversation_of(entry["turns"], entry, turns, task=task)]


def conversation_of(
    value: Any, entry: Entry, turns: Turns, *, task: str = "chat", field: str = "turns"
) -> WorkloadRequest:
    """A conversation that begins with the first of several questions; the others are asked later,
    unless `turns` wants the first alone. `field` is where they were. Raises UnusableError."""
    name = _name(entry)
    first, *later = _questions(value, field)
    if any(question.startswith(PLACEHOLDER) for question in (first, *later)):
        raise UnusableError(
            f"the text of question {name} is a placeholder: SPEED-Bench has to be completed from its "
            f"sources once, with {PREPARE}"
        )
    return WorkloadRequest(
        name,
        messages=({"role": "user", "content": first},),
        task=task,
        later=() if turns == "first" else tuple(later),
    )


def _name(entry: Entry) -> str:
    return _text(entry, "question_id", "prompt_id", "id") or ""


def _questions(value: Any, field: str) -> list[str]:
    if not isinstance(value, list) or not value:
        raise UnusableError(f"'{field}' must be a list of questions")
    return [_asked({field: question}, field) for question in value]


FORMS: dict[str, Callable[[Entry, Turns], list[WorkloadRequest]]] = {
    "canonical_solution": _humaneval,
    "request": _logged,
    "body": _logged,
    "prompt": _own,
    "messages": _own,
    "conversations": _sharegpt,
    "turns": _spec_bench,
    "problem": _math,
    "question": _gsm8k,
}
