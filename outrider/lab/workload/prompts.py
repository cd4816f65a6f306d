"""From requests to token ids, as `outrider.LLM` makes them, and what does not fit.

Nothing is ever cut: a request that does not fit into the context together with its answer is named,
and refused or left out as asked. A prompt that fits alone, but not with its answer, would be
answered by fewer tokens and spoil the comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    reader = _Reader(tokenizer, context, max_tokens, chat_template, answer)
    prompts = list[PreparedPrompt]()
    unfit = list[str]()
    begun = Counter[str]()  # conversations
    numbers = Counter[str]()  # prompts
    num_unasked = 0
    for first in workload.requests:
        task = first.task
        if begun[task] >= per_task:
            continue
        turns = list(reader.turns(first))
        begun[task] += on_bad == "refuse" or isinstance(turns[0], PreparedPrompt)
        for turn in turns:
            if isinstance(turn, str):
                unfit.append(turn)
            else:
                prompts.append(replace(turn, number=numbers[task]))
                numbers[task] += 1
        last = turns[-1]
        num_unasked += isinstance(last, PreparedPrompt) and bool(last.request.later)
    if unfit and (on_bad == "refuse" or not prompts):
        raise ConfigError(_message(workload, unfit, on_bad))
    return Prepared(tuple(prompts), tuple(unfit), num_unasked)


@dataclass(frozen=True)
class _Reader:
    """How requests become prompts: the arguments of `prepare`."""

    tokenizer: Any
    context: int
    max_tokens: int
    chat_template: bool
    answer: Answer | None

    def turns(self, first: WorkloadRequest) -> Iterator[PreparedPrompt | str]:
        """A request, and the later turns of its conversation; the reason in place of one that does
        not fit, which is the last."""
        request = first
        while True:
            turn = self._prompt(request)
            yield turn
            if isinstance(turn, str) or not request.later:
                return
            if self.answer is None or not self.chat_template:
                return
            request = request.next_turn(self.answer(turn))

    def _prompt(self, request: WorkloadRequest) -> PreparedPrompt | str:
        room = min(self.max_tokens, request.max_tokens or self.max_tokens)
        try:
            tokens = to_tokens(request, self.tokenizer, chat_template=self.chat_template)
        except RequestError as error:
            return f"{request.id}: {error}"
        reason = fit(tokens, self.context, room)
        return (
            PreparedPrompt(request, tokens, room) if reason is None else f"{request.id}: {reason}"
        )


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
