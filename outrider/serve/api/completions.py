"""/v1/completions: texts continued, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from outrider.engine.request import Request, Update
from outrider.sampling.params import SamplingParams
from outrider.serve.api.exchange import Exchange, finish_reason, make_exchange, stop_reason
from outrider.serve.api.logprobs import LogprobLists, Namer, joined, prompt_logprobs
from outrider.serve.api.response_format import form_asked
from outrider.serve.api.sse import Marks
from outrider.serve.api.usage import no_usage, so_far
from outrider.serve.observability.traffic import LoggedAnswer, LoggedExchange
from outrider.serve.routing import Prompts, choose, model_named
from outrider.serve.rules import RequestFacts
from outrider.serve.schema.completion import CompletionBody
from outrider.serve.served import Served, ServerState
from outrider.text import Detokenizer

KIND = "text_completion"


class CompletionRequest:
    """One request to the endpoint. Make it with `prepared`; then either `whole` or `chunks`."""

    def __init__(self, body: CompletionBody, exchange: Exchange, texts: list[str | None]) -> None:
        self._body = body
        self._exchange = exchange
        served = exchange.served
        self._choices = [
            CompletionChoiceWriter(
                number, body, served, exchange.requests[number], texts[exchange.prompt_of(number)]
            )
            for number in range(len(exchange.requests))
        ]
        self._shown: list[int] = []  # numbers of the answers that the client gets

    @classmethod
    async def prepared(cls, state: ServerState, body: CompletionBody) -> CompletionRequest:
        """Route it, read its prompts, check everything. Raises ApiError or ConfigError."""

        async def read(served: Served) -> Prompts:
            return [await _tokens(served, prompt, body) for prompt in body.prompts()]

        form = form_asked(body)
        asked = RequestFacts(
            model_named(state, body.model), "completions", tools=False, structured=form is not None
        )
        route = await choose(state, asked, len(body.prompts()) * body.num_generated, read)
        # ranking needs the tokens' own
        wants = body.logprobs if not body.is_ranked else body.logprobs or 0

        def params(answer: int, prompt: list[int]) -> SamplingParams:
            defaults = route.served.engine.sampling_defaults.values
            longest = (
                defaults.get("max_tokens", body.limit)
                if body.max_tokens is None
                else max(1, body.limit)
            )
            return body.sampling(defaults, max_tokens=longest, logprobs=wants, choice=answer)

        exchange = await make_exchange(
            "cmpl",
            body,
            route,
            body.num_generated,
            params,
            state.settings.request_timeout_s,
            form=form,
            prompt_logprobs=body.logprobs
            if body.echo and body.logprobs is not None
            else body.prompt_logprobs,
        )
        texts = [
            None
            if not body.echo
            else prompt
            if isinstance(prompt, str)
            else route.served.texts.decode(
                prompt, flush=not body.limit
            )  # the answer begins with an unfinished character
            for prompt in body.prompts()
        ]
        return cls(body, exchange, texts)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        answers = await self._exchange.answers()
        choices: list[dict[str, Any]] = []
        per_prompt = self._body.num_generated
        for start in range(0, len(answers), per_prompt):
            numbers = list(range(start, start + per_prompt))
            if self._body.is_ranked:
                numbers.sort(key=lambda number: -_likelihood(answers[number]))
            self._shown += numbers[: self._body.num_choices]
            for number in numbers[: self._body.num_choices]:
                choices.append(
                    {**self._choices[number].render(answers[number]), "index": len(choices)}
                )
        return {**self._exchange.head(KIND), "choices": choices, **self._bill()}

    def logged(self) -> list[LoggedExchange]:
        """The exchange once it has ended, one for each prompt; none where no answer was asked for."""
        shown = [self._choices[number].logged() for number in self._shown]
        if (
            not shown
            or not self._body.limit
            or any(answer.finish_reason is None for answer in shown)
        ):
            return []
        fields = self._body.model_dump(
            exclude_none=True, exclude_unset=True, exclude={"prompt", "prompt_token_ids"}
        )
        prompts = self._body.prompts()
        decode = self._exchange.served.texts.decode
        is_alone = len(prompts) == 1
        bill = self._bill()["usage"] if is_alone else {}
        exchanges = []
        for number, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else decode(prompt)
            answers = shown[number * self._body.num_choices : (number + 1) * self._body.num_choices]
            name = self._exchange.id if is_alone else f"{self._exchange.id}-{number}"
            exchanges.append(LoggedExchange(name, {**fields, "prompt": text}, answers, bill))
        return exchanges

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as a stream. What the engine refuses is raised here, before the first chunk."""
        self._shown = list(range(len(self._choices)))
        return self._chunks(self._exchange.updates(self._exchange.launch()))

    @property
    def marks(self) -> Marks:
        """The marks of its stream."""
        return self._exchange.marks

    def cancel(self) -> None:
        """End what still runs."""
        self._exchange.cancel()

    async def _chunks(
        self, updates: AsyncGenerator[tuple[int, Update], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        head = self._exchange.head(KIND)
        usage = self._so_far if self._body.continuous_usage else no_usage
        async with aclosing(updates):
            async for number, update in updates:
                if self._choices[number].shows(update):
                    yield {
                        **head,
                        "choices": [self._choices[number].render(update)],
                        **usage(number),
                        **(self._closing() if update.finish is not None else {}),
                    }
        if self._body.include_usage:
            yield {**head, "choices": [], **self._bill()}

    def _closing(self) -> dict[str, Any]:
        """Fields of the last chunk with text, where none follows that has the bill."""
        if self._body.include_usage or not self._exchange.is_finished:
            return {}
        return {"timings": self._bill()["timings"]}

    def _so_far(self, number: int) -> dict[str, Any]:
        prompt = self._exchange.prompts[self._exchange.prompt_of(number)]
        return self._exchange.usage_so_far(number) if self._body.limit else so_far(len(prompt), 0)

    def _bill(self) -> dict[str, Any]:
        if not self._body.limit:  # the one token that was generated is not the client's
            self._exchange.costs = [replace(cost, num_tokens=0) for cost in self._exchange.costs]
        return self._exchange.bill()


class CompletionChoiceWriter:
    """One answer, written piece by piece."""

    def __init__(
        self, index: int, body: CompletionBody, served: Served, request: Request, echo: str | None
    ) -> None:
        self._index = index
        self._body = body
        self._prompt = request.prompt
        self._echo = echo
        self._name = Namer(served.texts.bytes, as_ids=bool(body.return_tokens_as_token_ids))
        self._logprobs = LogprobLists(self._name, body.logprobs or 0, served.answer_text(request))
        self._tokenizer = served.texts.tokenizer
        # characters of the text up to now
        self._begun = False
        self._length = 0
        self._text = ""  # without the echo
        self._finish_reason: str | None = None

    def shows(self, update: Update) -> bool:
        """Whether a client would learn anything: text may be held back while it could become a stop
        string."""
        body = self._body
        silent = (
            body.logprobs is None and not body.return_token_ids and not body.return_token_origins
        )
        return bool(update.text or update.finish or not self._begun) or not silent

    def render(self, update: Update) -> dict[str, Any]:
        """The choice with what `update` adds, the echoed prompt in front of the first."""
        first = not self._begun
        self._begun = True
        body = self._body
        finish = update.finish
        if not body.limit:  # one token was generated because a prompt alone cannot be asked for
            update = Update(prompt_logprobs=update.prompt_logprobs)
        text = (self._echo or "") + update.text if first else update.text
        self._length += len(text)
        self._text += update.text
        self._finish_reason = finish_reason(finish) if body.limit or finish is None else "length"
        choice: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs_of(update, first) if body.logprobs is not None else None,
            "finish_reason": self._finish_reason,
            "stop_reason": stop_reason(finish) if body.limit else None,
        }
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs(self._name, update.prompt_logprobs or [])
        if body.return_token_ids:
            choice["token_ids"] = update.token_ids
            choice["prompt_token_ids"] = self._prompt if first else None
        if body.return_token_origins:
            choice["token_origins"] = [
                list(pair) for pair in zip(update.pieces, update.origins, strict=True)
            ]
        return choice

    def logged(self) -> LoggedAnswer:
        """The whole answer, for the log of requests."""
        return LoggedAnswer(self._text, None, self._finish_reason)

    def _logprobs_of(self, update: Update, first: bool) -> dict[str, Any]:
        parts = []
        if first and self._echo is not None:
            of_prompt = update.prompt_logprobs or [None] * len(self._prompt)
            detokenizer = Detokenizer(self._tokenizer, [], special=True)
            parts.append(self._logprobs.prompt(self._prompt, of_prompt, self._echo, detokenizer))
        end = None if update.finish is None else self._length
        parts.append(self._logprobs.answer(update.token_ids, update.logprobs, end))
        return joined(parts)


def _likelihood(answer: Update) -> float:
    """Mean log-probability of its tokens: by this `best_of` ranks, as OpenAI documents it."""
    chosen = [
        logprobs[token] for logprobs, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    return sum(chosen) / len(chosen) if chosen else 0.0


async def _tokens(served: Served, prompt: str | list[int], body: CompletionBody) -> list[int]:
    if body.suffix or (body.suffix == "" and served.texts.can_fill):
        text = prompt if isinstance(prompt, str) else served.texts.decode(prompt)
        return await served.texts.fill(text, body.suffix)
    if isinstance(prompt, str):
        return (
            await served.texts.encode(prompt, special=body.add_special_tokens is not False)
            if prompt
            else []
        )
    return prompt
