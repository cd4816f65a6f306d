"""/v1/chat/completions: conversations answered, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from outrider.engine.request import Update
from outrider.serve.api.dialogue import Answering, Dialogue
from outrider.serve.api.exchange import Exchange
from outrider.serve.api.logprobs import Namer, chat_logprobs
from outrider.serve.api.reply import Delta, Reply, whole_message
from outrider.serve.api.usage import no_usage
from outrider.serve.headers import IgnoredFields
from outrider.serve.schema.chat import ChatBody
from outrider.serve.served import ServerState

WHOLE = "chat.completion"
CHUNK = "chat.completion.chunk"


class Chat(Answering):
    """One request to the endpoint. Make it with `prepared`; then either `whole` or `chunks`."""

    def __init__(self, dialogue: Dialogue) -> None:
        super().__init__(dialogue)
        self._body = dialogue.body
        self._exchange = dialogue.exchange
        self._choices = [
            ChatChoiceWriter(number, dialogue.body, dialogue.exchange, reply)
            for number, reply in enumerate(dialogue.replies)
        ]

    @classmethod
    async def prepared(cls, state: ServerState, body: ChatBody, ignored: IgnoredFields) -> Chat:
        """Route it, render the conversation, check everything. Raises ApiError or ConfigError."""
        return cls(await Dialogue.prepared(state, body, ignored))

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        answers = await self._exchange.answers()
        choices = [
            choice.message(answer) for choice, answer in zip(self._choices, answers, strict=True)
        ]
        found = {**self._exchange.head(WHOLE), "choices": choices, **self._dialogue.bill()}
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._exchange.prompts[0]
        return found

    async def _chunks(
        self, updates: AsyncGenerator[tuple[int, Update], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        head = self._exchange.head(CHUNK)
        usage = self._exchange.usage_so_far if self._body.continuous_usage else no_usage
        for number, choice in enumerate(self._choices):
            first = {**head, "choices": [choice.opening()], **usage(number)}
            yield (
                {**first, "prompt_token_ids": self._exchange.prompts[0]}
                if self._body.return_token_ids
                else first
            )
        async with aclosing(updates):
            async for number, update in updates:
                for delta in self._choices[number].deltas(update):
                    ends = delta["finish_reason"] is not None
                    closing = self._closing() if ends else {}
                    yield {**head, "choices": [delta], **usage(number), **closing}
        if self._body.include_usage:
            yield {**head, "choices": [], **self._dialogue.bill()}

    def _closing(self) -> dict[str, Any]:
        """Fields of the last chunk with text, where none follows that has the bill."""
        if self._body.include_usage or not self._exchange.is_finished:
            return {}
        return {"timings": self._dialogue.bill()["timings"]}


class ChatChoiceWriter:
    """One answer, written piece by piece."""

    def __init__(self, index: int, body: ChatBody, exchange: Exchange, reply: Reply) -> None:
        served = exchange.served
        self._index = index
        self._body = body
        self._served = served
        self._answer = served.answer_text(exchange.requests[index])
        self._reply = reply

    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def message(self, update: Update) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        message = _sent(whole_message(self._reply.push(update)))
        return {"index": self._index, "message": message, **self._about(update), **self._ending()}

    def deltas(self, update: Update) -> list[dict[str, Any]]:
        """The choices of a stream's next chunks: the update's content, then why the answer ended."""
        parts = self._reply.push(update)
        about = self._about(update)
        has_facts = about["logprobs"] is not None or any(
            about[name] for name in about if name != "logprobs"
        )
        if not parts and has_facts and update.token_ids:
            parts = [{"content": ""}]
        silent = {"logprobs": None}
        chunks = [
            {
                "index": self._index,
                "delta": _sent(part),
                **(about if number == 0 else silent),
                "finish_reason": None,
            }
            for number, part in enumerate(parts)
        ]
        if update.finish is not None:
            chunks.append({"index": self._index, "delta": {}, **silent, **self._ending()})
        return chunks

    def _about(self, update: Update) -> dict[str, Any]:
        """The extras that were asked for besides the text."""
        body = self._body
        count = self._body.num_logprobs
        about: dict[str, Any] = {"logprobs": None}
        if count is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            name = Namer(self._served.texts.bytes, as_ids=as_ids)
            about["logprobs"] = chat_logprobs(
                name, self._answer, update.token_ids, update.logprobs, count
            )
        if body.return_token_ids:
            about["token_ids"] = update.token_ids
        if body.return_token_origins:
            about["token_origins"] = [
                list(pair) for pair in zip(update.pieces, update.origins, strict=True)
            ]
        return about

    def _ending(self) -> dict[str, Any]:
        return {"finish_reason": self._reply.finish_reason, "stop_reason": self._reply.stop_reason}


def _sent(delta: Delta) -> Delta:
    """Thoughts under both of their names: vLLM's, and the older one that DeepSeek's clients and
    most others read."""
    thought = delta.get("reasoning")
    return (
        delta if thought is None else {**delta, "reasoning": thought, "reasoning_content": thought}
    )
