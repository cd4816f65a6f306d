"""From requests to token ids, as `outrider.LLM` makes them, and what does not fit.

Nothing is ever cut: a request that does not fit into the context together with its answer is named,
and refused or left out as asked. A prompt that fits alone, but not with its answer, would be
answered by fewer tokens and spoil the comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError, RequestError, counted
from outrider.lab.workload.types import OnBad, Workload, WorkloadRequest, listing
from outrider.messages import encode_conversation, template_text
from outrider.models.tokens.token_text import end_of_turn


@dataclass(frozen=True)
class PreparedPrompt:
    """A request, ready to run."""

    request: WorkloadRequest
    tokens: list[int]
    max_tokens: int  # of the answer
    number: int = 0  # within its task


@dataclass(frozen=True)
class Prepared:
    """The prompts that `prepare` made of a workload."""

    prompts: tuple[PreparedPrompt, ...]
    skipped: tuple[str, ...] = ()  # "id: reason" of requests that cannot run on this model

    @property
    def notes(self) -> list[str]:
        left_out = counted(len(self.skipped), "prompt")
        return [f"{left_out} left out, the first: {self.skipped[0]}"] if self.skipped else []


def to_tokens(request: WorkloadRequest, tokenizer: Any, *, chat_template: bool = True) -> list[int]:
    """Token ids of a request: the ids `LLM.generate(prompt)` and `LLM.chat_prompt(messages)` would
    feed.

    `chat_template=False` feeds a conversation of one question as plain text, a system message
    before it, for base models. Raises ConfigError when the model has no chat template, RequestError
    when the request is the reason; both name it.
    """
    if request.messages is None:
        tokens = tokenizer(request.prompt)["input_ids"]
    elif not chat_template:
        tokens = tokenizer(_as_text(request))["input_ids"]
    else:
        tokens = _by_template(request, tokenizer)
    if not tokens:
        raise RequestError(f"request '{request.id}' is empty: its prompt has no tokens")
    return list(tokens)


def end_of_answer(
    request: WorkloadRequest, tokenizer: Any, *, chat_template: bool = True
) -> int | None:
    """The token with which a model ends its answer to a request: the chat template's where it is
    used, else the eos_token."""
    by_template = request.messages is not None and chat_template
    end: int | None = end_of_turn(tokenizer) if by_template else tokenizer.eos_token_id
    return end


def fit(tokens: list[int], context: int, max_tokens: int) -> str | None:
    """None when prompt and answer fit into the context, else why not."""
    if len(tokens) + max_tokens <= context:
        return None
    return f"{len(tokens)} prompt tokens and {max_tokens} to answer make {len(tokens) + max_tokens}; the context holds {context}"


def prepare(
    workload: Workload,
    tokenizer: Any,
    *,
    context: int,
    max_tokens: int,
    on_bad: OnBad = "refuse",
    chat_template: bool = True,
    per_task: float = math.inf,
) -> Prepared:
    """Tokens of every request, or of the first `per_task` of each task; later ones take the place
    of those that are skipped.

    Answers get `max_tokens`, or fewer where the log asked for fewer. Raises ConfigError naming the
    first requests that do not fit with `on_bad="refuse"`, or when none fits.
    """
    prompts = list[PreparedPrompt]()
    unfit = list[str]()
    taken = Counter[str]()
    for request in workload.requests:
        if taken[request.task] >= per_task:
            continue
        room = min(max_tokens, request.max_tokens or max_tokens)
        try:
            tokens = to_tokens(request, tokenizer, chat_template=chat_template)
            reason = fit(tokens, context, room)
        except RequestError as error:
            reason = str(error)
        if reason is None:
            prompts.append(PreparedPrompt(request, tokens, room, taken[request.task]))
        else:
            unfit.append(f"{request.id}: {reason}")
        taken[request.task] += reason is None or on_bad == "refuse"
    if unfit and (on_bad == "refuse" or not prompts):
        raise ConfigError(_message(workload, unfit, on_bad))
    return Prepared(tuple(prompts), tuple(unfit))


def _message(workload: Workload, unfit: list[str], on_bad: OnBad) -> str:
    head = f"{len(unfit)} of {len(workload.requests)} requests of {workload.name} cannot run on this model:"
    skip = (
        "ask for fewer tokens, or leave these requests out (on_bad='skip', --reading on_bad=skip)"
    )
    remedy = (
        skip
        if on_bad == "refuse"
        else "none is left; ask for fewer tokens, or take another workload"
    )
    return listing(head, unfit, remedy)


def _by_template(request: WorkloadRequest, tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"request '{request.id}' is a conversation, and the model has no chat template; use a "
            "workload of plain prompts, or feed conversations as plain text (chat_template=False)"
        )
    try:
        return encode_conversation(
            tokenizer, request.messages or (), template_text(tokenizer), add_generation_prompt=True
        )
    except RequestError as error:
        raise RequestError(f"request '{request.id}': {error}") from error


def _as_text(request: WorkloadRequest) -> str:
    roles = [message["role"] for message in request.messages or ()]
    if roles not in (["user"], ["system", "user"]):
        raise RequestError(
            f"request '{request.id}' has {len(roles)} turns; without a chat template only one "
            "question can be fed"
        )
    return "\n\n".join(message["content"] for message in request.messages or ())
