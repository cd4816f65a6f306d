"""A conversation that is being answered, by whatever interface it came: engine requests, and how
their answers are read."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.engine.request import Update
from outrider.errors import OutriderError, RequestError
from outrider.messages import CallError
from outrider.sampling.params import SamplingParams
from outrider.serve.api.conversation import render, thinking_in, unread_thoughts
from outrider.serve.api.exchange import Exchange, make_exchange
from outrider.serve.api.reasoning import for_engine
from outrider.serve.api.reply import Reply
from outrider.serve.api.response_format import form_asked
from outrider.serve.api.resumption import Marks
from outrider.serve.errors import ApiError, as_api_error
from outrider.serve.ignored import IgnoredFields
from outrider.serve.observability.traffic import LoggedExchange
from outrider.serve.routing import Prompts, choose, model_named
from outrider.serve.rules import RequestFacts
from outrider.serve.schema.chat import ChatBody, ToolChoice
from outrider.serve.served import Served, ServerState
from outrider.serve.tools.use import ToolUse, tool_use


@dataclass(frozen=True)
class Interface:
    """What differs by the interface that a conversation came by."""

    kind: str  # begins the ids of its answers
    # the path of thoughts in its bodies, where it is not that of chat completions
    thought: str | None = None
    usual_effort: str = "medium"  # which it documents as the default, so that it asks for nothing
    # of fields of chat completions, as patterns -> its own
    names: Mapping[str, str] = field(default_factory=dict)

    def effort(self, wanted: str | None, served: Served) -> str | None:
        """For the chat template; none where the usual one is wanted and the template knows no
        other."""
        known = "reasoning_effort" in served.texts.template_variables
        return None if wanted == self.usual_effort and not known else wanted

    @contextmanager
    def words(self, place_of: Callable[[Mapping[str, Any]], str]) -> Iterator[None]:
        """Errors name what the client wrote: fields by their names in this interface, and a call by
        its place in the body."""
        try:
            yield
        except CallError as error:
            raise self._renamed(as_api_error(error.at(place_of(error.call)))) from error
        except OutriderError as error:
            raise self._renamed(as_api_error(error)) from error

    def _renamed(self, error: ApiError) -> ApiError:
        param = None if error.param is None else self._own(error.param)
        return ApiError(
            self._own(str(error)),
            status=error.status,
            kind=error.kind,
            param=param,
            code=error.code,
            headers=error.headers,
        )

    def _own(self, text: str) -> str:
        for name, own in self.names.items():
            text = re.sub(rf"(?<![\w.]){name}(?!\w)", own, text)
        return text


CHAT = Interface("chatcmpl")


@dataclass
class Dialogue:
    """Make it with `prepared`; then either `answers` or `updates`."""

    body: ChatBody
    exchange: Exchange
    replies: list[Reply]  # one per answer

    @classmethod
    async def prepared(
        cls, state: ServerState, body: ChatBody, ignored: IgnoredFields, interface: Interface = CHAT
    ) -> Dialogue:
        """Route it, render the conversation, check everything. Raises ApiError or ConfigError."""
        form = form_asked(body)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        named = body.tool_choice
        choice = named.model_dump() if isinstance(named, ToolChoice) else named

        def use_of(served: Served) -> ToolUse | None:
            texts = served.texts
            return tool_use(
                tools,
                choice,
                body.parallel_tool_calls,
                template=texts.chat_template,
                tokenizer=texts.tokenizer,
            )

        async def read(served: Served) -> Prompts:
            if body.messages is None:
                return [list(body.prompt_token_ids or [])]
            use = use_of(served)
            return [await _rendered(served, body, None if use is None else use.rendered, interface)]

        asked = RequestFacts(
            model_named(state, body.model), "chat", tools=bool(tools), structured=form is not None
        )
        route = await choose(state, asked, body.num_choices, read)
        use = use_of(route.served)
        unread = unread_thoughts(body.messages, route.served)
        path = interface.thought
        ignored.add(
            unread if path is None else (replace(one, path=path, param=path) for one in unread)
        )
        spec = form if use is None else use.spec_beside(form)
        thinking = thinking_in(route.served, body, route.prompts[0], is_held=spec is not None)

        def params(answer: int, prompt: list[int]) -> SamplingParams:
            room = max(1, route.served.engine.context - len(prompt))
            defaults = route.served.engine.sampling_defaults.values
            longest = min(body.limit or defaults.get("max_tokens") or room, room)
            sampling = body.sampling(
                defaults, max_tokens=longest, logprobs=body.num_logprobs, choice=answer
            )
            return replace(sampling, thinking=for_engine(thinking, sampling, spec))

        if use is not None and use.spec is not None and body.allowed_token_ids is not None:
            raise RequestError(
                "allowed_token_ids beside enforced tools may leave no token to emit: give one of "
                "them"
            )
        exchange = await make_exchange(
            interface.kind,
            body,
            route,
            body.num_choices,
            params,
            state.settings.request_timeout_s,
            form=spec,
        )
        shown_thinking = None if body.separate_reasoning is False else thinking
        return cls(
            body,
            exchange,
            [Reply(route.served, body, use, shown_thinking) for _ in exchange.requests],
        )

    def logged(self) -> LoggedExchange | None:
        """The conversation and its answers, for the log of requests; None where one of them did not
        end."""
        answers = [reply.logged() for reply in self.replies]
        if any(answer.finish_reason is None for answer in answers):
            return None
        asked = self.body.model_dump(exclude_none=True, exclude_unset=True, by_alias=True)
        if self.body.messages is None:
            del asked["prompt_token_ids"]
            asked["prompt"] = self.exchange.served.texts.decode(self.exchange.prompts[0])
        return LoggedExchange(self.exchange.id, asked, answers, self.bill()["usage"])

    def updates(self) -> AsyncGenerator[tuple[int, Update], None]:
        """(number of the answer, update), as they come. What the engine refuses is raised here,
        before the first of them."""
        return self.exchange.updates(self.exchange.launch())

    def cancel(self) -> None:
        """End what still runs."""
        self.exchange.cancel()

    def bill(self) -> dict[str, Any]:
        """`usage` and `metrics`, once everything has finished."""
        counts = self.exchange.served.reasoning is not None
        return self.exchange.bill(
            sum(reply.num_thought for reply in self.replies) if counts else None
        )


async def num_prompt_tokens(served: Served, chat: ChatBody, interface: Interface) -> int:
    """Tokens of a conversation as the model reads it. Raises ApiError where it cannot be rendered."""
    tools = [tool.model_dump(exclude_none=True) for tool in chat.tools or []]
    return len(
        await _rendered(
            served, chat, tools if tools and chat.tool_choice != "none" else None, interface
        )
    )


async def _rendered(
    served: Served, chat: ChatBody, tools: Sequence[Mapping[str, Any]] | None, interface: Interface
) -> list[int]:
    effort = interface.effort(chat.reasoning_effort, served)
    return await render(
        served,
        chat.messages or [],
        chat,
        tools=tools,
        thinking=chat.thinking,
        reasoning_effort=effort,
    )


class Answering(ABC):
    """One request of an interface to conversations: what their endpoints have in common, whatever
    their events look like."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._id = dialogue.exchange.id

    def logged(self) -> list[LoggedExchange]:
        """The exchange as that of a chat completion, once it has ended."""
        exchange = self._dialogue.logged()
        return [] if exchange is None else [exchange._replace(id=self._id)]

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as a stream. What the engine refuses is raised here, before the first event."""
        return self._chunks(self._dialogue.updates())

    @property
    def marks(self) -> Marks:
        """The marks of its stream."""
        return self._dialogue.exchange.marks

    def cancel(self) -> None:
        """End what still runs."""
        self._dialogue.cancel()

    @abstractmethod
    def _chunks(
        self, updates: AsyncGenerator[tuple[int, Update], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The interface's events, made of the engine's updates."""
