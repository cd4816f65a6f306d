"""From requests to token ids, as `outrider.LLM` makes them, and what does not fit.

Nothing is ever cut: a request that does not fit into the context together with its answer is named,
and refused or left out as asked. A prompt that fits alone, but not with its answer, would be
answered by fewer tokens and spoil the comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
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


Answer = Callable[[PreparedPrompt], str]


@dataclass(frozen=True)
class Prepared:
    """The prompts that `prepare` made of a workload."""

    prompts: tuple[PreparedPrompt, ...]
    skipped: tuple[str, ...] = ()  # "id: reason" of requests that cannot run on this model
    num_unasked: int = 0  # conversations whose later questions are not asked

    @property
    def notes(self) -> list[str]:
        notes = []
        if self.skipped:
            left_out = counted(len(self.skipped), "prompt")
            notes.append(f"{left_out} left out, the first: {self.skipped[0]}")
        if self.num_unasked:
            count = counted(self.num_unasked, "conversation")
            notes.append(f"only the first question of {count} is asked")
        later = [prompt for prompt in self.prompts if prompt.request.turn > 1]
        if later:
            notes.append(
                f"{counted(len(later), 'later turn')} of conversations, each after the target's own "
                "greedy answers to the questions before it"
            )
        return notes


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
    answer: Answer | None = None,
) -> Prepared:
    """Tokens of every request, or of the first `per_task` of each task; later ones take the place
    of those that are skipped.

    Answers get `max_tokens`, or fewer where the log asked for fewer. `answer` answers a question of
    a conversation, so that the next one can be asked; without it, and without a chat template, only
    first questions are asked. Each turn is a prompt; `per_task` counts conversations. Raises
    ConfigError naming the first requests that do not fit with `on_bad="refuse"`, or when none fits.
    """
    prompts = list[PreparedPrompt]()
    unfit = list[str]()
    begun = Counter[str]()  # conversations
    numbers = Counter[str]()  # prompts
    num_unasked = 0
    for first in workload.requests:
        if begun[first.task] >= per_task:
            continue
        turn: WorkloadRequest | None = first
        while turn is not None:
            request = turn
            turn = None
            room = min(max_tokens, request.max_tokens or max_tokens)
            try:
                tokens = to_tokens(request, tokenizer, chat_template=chat_template)
                reason = fit(tokens, context, room)
            except RequestError as error:
                reason = str(error)
            if request is first:
                begun[first.task] += reason is None or on_bad == "refuse"
            if reason is not None:
                unfit.append(f"{request.id}: {reason}")
                continue
            prompt = PreparedPrompt(request, tokens, room, numbers[request.task])
            prompts.append(prompt)
            numbers[request.task] += 1
            if not request.later:
                continue
            if answer is not None and chat_template:
                turn = request.next_turn(answer(prompt))
            else:
                num_unasked += 1
    if unfit and (on_bad == "refuse" or not prompts):
        raise ConfigError(_message(workload, unfit, on_bad))
    return Prepared(tuple(prompts), tuple(unfit), num_unasked)


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
