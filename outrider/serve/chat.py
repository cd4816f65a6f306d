"""/v1/chat/completions: conversations answered, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from outrider.engine.request import Update
from outrider.errors import RequestError
from outrider.sampling.params import SamplingParams
from outrider.sampling.thinking import Thinking
from outrider.serve.constraints import form_of
from outrider.serve.conversation import render, thinking_in, unread_thoughts
from outrider.serve.exchange import Exchange, make_exchange
from outrider.serve.ignored import IgnoredFields
from outrider.serve.logprobs import Namer, chat_logprobs
from outrider.serve.reader import Delta, whole_message
from outrider.serve.reasoning import for_engine
from outrider.serve.reply import Reply
from outrider.serve.routing import Prompts, choose, model_named
from outrider.serve.rules import Asked
from outrider.serve.schema.chat import ChatBody, ToolChoice
from outrider.serve.served import Served, ServerState
from outrider.serve.tools import ToolUse, tool_use
from outrider.serve.usage import no_usage

WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"


class Chat:
    """One request to the endpoint. Make it with `prepared`; then either `whole` or `chunks`."""

    def __init__(self, body: ChatBody, exchange: Exchange, use: ToolUse | None, thinking: Thinking | None) -> None:
        self._body = body
        self._exchange = exchange
        self._choices = [Choice(number, body, exchange, use, thinking) for number in range(len(exchange.requests))]

    @classmethod
    async def prepared(cls, state: ServerState, body: ChatBody, ignored: IgnoredFields) -> Chat:
        """Route it, render the conversation, check everything. Raises ApiError or ConfigError."""
        form = form_of(body)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        named = body.tool_choice
        choice = named.model_dump() if isinstance(named, ToolChoice) else named

        def use_of(served: Served) -> ToolUse | None:
            texts = served.texts
            return tool_use(
                tools, choice, body.parallel_tool_calls, template=texts.chat_template, tokenizer=texts.tokenizer
            )

        async def read(served: Served) -> Prompts:
            if body.messages is None:
                return [list(body.prompt_token_ids or [])]
            use = use_of(served)
            rendered = None if use is None else use.rendered
            return [await render(served, body.messages, body, tools=rendered, reasoning_effort=body.reasoning_effort)]

        asked = Asked(model_named(state, body.model), "chat", tools=bool(tools), structured=form is not None)
        route = await choose(state, asked, body.num_choices, read)
        use = use_of(route.served)
        ignored.add(unread_thoughts(body.messages, route.served))
        spec = form if use is None else use.spec_beside(form)
        thinking = thinking_in(route.served, body, route.prompts[0], is_held=spec is not None)

        def params(answer: int, prompt: list[int]) -> SamplingParams:
            room, defaults = max(1, route.served.engine.context - len(prompt)), route.served.engine.sampling_defaults.values
            longest = min(body.limit or defaults.get("max_tokens") or room, room)
            sampling = body.sampling(defaults, max_tokens=longest, logprobs=body.num_logprobs, choice=answer)
            return replace(sampling, thinking=for_engine(thinking, sampling, spec))

        if use is not None and use.spec is not None and body.allowed_token_ids is not None:
            raise RequestError("allowed_token_ids beside enforced tools may leave no token to say: give one of them")
        exchange = await make_exchange(
            "chatcmpl", body, route, body.num_choices, params, state.settings.request_timeout_s, form=spec
        )
        return cls(body, exchange, use, None if body.separate_reasoning is False else thinking)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        answers = await self._exchange.answers()
        choices = [choice.message(answer.whole()) for choice, answer in zip(self._choices, answers, strict=True)]
        found = {**self._exchange.head(WHOLE), "choices": choices, **self._bill()}
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._exchange.prompts[0]
        return found

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as a stream. What the engine refuses is raised here, before the first chunk."""
        return self._chunks(self._exchange.updates(self._exchange.launch()))

    async def settle(self) -> None:
        """Wait until everything is taken for good. Raises what the engine raises for what it refuses."""
        await self._exchange.settle()

    def cancel(self) -> None:
        """End what still runs."""
        self._exchange.cancel()

    async def _chunks(self, updates: AsyncGenerator[tuple[int, Update], None]) -> AsyncGenerator[dict[str, Any], None]:
        head = self._exchange.head(CHUNK)
        usage = self._exchange.usage_so_far if self._body.continuous_usage else no_usage
        for number, choice in enumerate(self._choices):
            first = {**head, "choices": [choice.opening()], **usage(number)}
            yield {**first, "prompt_token_ids": self._exchange.prompts[0]} if self._body.return_token_ids else first
        async with aclosing(updates):
            async for number, update in updates:
                for delta in self._choices[number].deltas(update):
                    yield {**head, "choices": [delta], **usage(number)}
        if self._body.include_usage:
            yield {**head, "choices": [], **self._bill()}

    def _bill(self) -> dict[str, Any]:
        counts = self._exchange.served.reasoning is not None
        return self._exchange.bill(sum(choice.num_thought for choice in self._choices) if counts else None)


class Choice:
    """One answer, written piece by piece."""

    def __init__(
        self, index: int, body: ChatBody, exchange: Exchange, use: ToolUse | None, thinking: Thinking | None
    ) -> None:
        served = exchange.served
        self._index, self._body = index, body
        self._name = Namer(served.texts.bytes, as_ids=bool(body.return_tokens_as_token_ids))
        self._answer = served.answer_text(exchange.requests[index])
        self._reply = Reply(served, body, use, thinking)

    @property
    def num_thought(self) -> int:
        """Tokens of thoughts so far."""
        return self._reply.num_thought

    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def message(self, update: Update) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        message = _told(whole_message(self._reply.push(update)))
        return {"index": self._index, "message": message, **self._about(update), **self._ending()}

    def deltas(self, update: Update) -> list[dict[str, Any]]:
        """The choices of a stream's next chunks: what the update says, then why the answer ended."""
        parts = self._reply.push(update)
        about = self._about(update)
        told = about["logprobs"] is not None or any(about[name] for name in about if name != "logprobs")
        if not parts and told and update.token_ids:
            parts = [{"content": ""}]
        silent = {"logprobs": None}
        found = [
            {"index": self._index, "delta": _told(part), **(about if place == 0 else silent), "finish_reason": None}
            for place, part in enumerate(parts)
        ]
        if update.finish is not None:
            found.append({"index": self._index, "delta": {}, **silent, **self._ending()})
        return found

    def _about(self, update: Update) -> dict[str, Any]:
        """What was asked for beside the text."""
        body, count = self._body, self._body.num_logprobs
        about: dict[str, Any] = {
            "logprobs": None
            if count is None
            else chat_logprobs(self._name, self._answer, update.token_ids, update.logprobs, count)
        }
        if body.return_token_ids:
            about["token_ids"] = update.token_ids
        if body.return_token_origins:
            about["token_origins"] = [list(pair) for pair in zip(update.pieces, update.origins, strict=True)]
        return about

    def _ending(self) -> dict[str, Any]:
        return {"finish_reason": self._reply.finish_reason, "stop_reason": self._reply.stop_reason}


def _told(delta: Delta) -> Delta:
    """Thoughts under both of their names: vLLM's, and the older one that DeepSeek's clients and most others read."""
    thought = delta.get("reasoning")
    return delta if thought is None else {**delta, "reasoning": thought, "reasoning_content": thought}
