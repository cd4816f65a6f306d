"""The texts of a replay: prompts and their recorded answers as token ids, and how a log of text
becomes that.

The tokens of a log are the tokenizer's for its text. They can differ from those that the model
emitted, which may write a word in pieces that a tokenizer would not cut it into; that is rare. Nor
does a log have the token that ended an answer: an answer not cut by its limit gets the end token of
the chat template or the tokenizer, as the model must have emitted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ConfigError, RequestError
from outrider.lab.workload.prompts import end_of_answer, to_tokens
from outrider.lab.workload.types import OnBad, Workload, WorkloadRequest, listing
from outrider.models.tokens.token_text import TokenText

FORMS = 'a replay needs the answers, too: lines like {"prompt": "...", "answer": "..."}, or another log of docs/workloads.md'


@dataclass(frozen=True)
class Text:
    """One prompt and its answer."""

    prompt: Sequence[int]  # at least one token
    answer: Sequence[int]  # at least one; with the token that ended it, if one did
    task: str = "other"
    id: str = ""
    max_tokens: int | None = None  # most tokens the answer could have had; None: it ended by itself


@dataclass(frozen=True)
class Log:
    """The texts of a workload."""

    texts: list[Text]
    # 'id: reason' of requests that cannot be replayed
    skipped: list[str] = field(default_factory=list)


def read_log(
    workload: Workload, tokenizer: Any, *, on_bad: OnBad = "refuse", chat_template: bool = True
) -> Log:
    """The requests that have an answer. `chat_template`: as for `to_tokens`.

    Raises ConfigError that names those without an answer or with an unusable prompt, with
    `on_bad="refuse"` or when there are no others.
    """
    pieces = TokenText(tokenizer)
    texts = []
    skipped = []
    for request in workload.requests:
        try:
            texts.append(_text(request, tokenizer, pieces, chat_template))
        except RequestError as error:
            skipped.append(f"{request.id}: {error}")
    if skipped and (on_bad == "refuse" or not texts):
        head = f"{len(skipped)} of {len(workload.requests)} requests of {workload.name} cannot be replayed:"
        remedy = "leave them out (on_bad='skip', --reading on_bad=skip)" if texts else FORMS
        raise ConfigError(listing(head, skipped, remedy))
    return Log(texts, skipped)


def _text(request: WorkloadRequest, tokenizer: Any, pieces: TokenText, chat_template: bool) -> Text:
    if not request.answer:
        raise RequestError("has no answer")
    prompt = to_tokens(request, tokenizer, chat_template=chat_template)
    answer = pieces.ids(request.answer, continues=True)
    was_cut = request.max_tokens is not None and len(answer) >= request.max_tokens
    end = end_of_answer(request, tokenizer, chat_template=chat_template)
    if not was_cut and end is not None and answer[-1:] != [end]:
        answer.append(end)
    if not answer:
        raise RequestError("its answer has no tokens")
    return Text(prompt, answer, request.task, request.id, len(answer) if was_cut else None)
