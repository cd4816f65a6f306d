"""A conversation that is being answered, by whatever interface it came: its prompt as the model's
own template renders it, engine requests, and how their answers are read."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.engine.request import Update
from outrider.errors import OutriderError, RequestError
from outrider.grammar import Spec
from outrider.messages import TAKEN, CallError, reads
from outrider.sampling.params import SamplingParams
from outrider.sampling.thinking import ThinkingMarks
from outrider.serve.api.exchange import Exchange, make_exchange
from outrider.serve.api.reply import Reply
from outrider.serve.api.response_format import form_asked
from outrider.serve.api.sse import Marks
from outrider.serve.api.texts import SharedTokenizer
from outrider.serve.errors import ApiError, as_api_error
from outrider.serve.headers import IgnoredFields
from outrider.serve.observability.traffic import LoggedExchange
from outrider.serve.routing import Prompts, choose, model_named
from outrider.serve.rules import RequestFacts
from outrider.serve.schema.base import UnknownField
from outrider.serve.schema.chat import ChatBody, ThinkingFields, ToolChoice
from outrider.serve.schema.messages import REASONING, Message, TemplateFields
from outrider.serve.served import Served, ServerState
from outrider.serve.tools.use import ToolUse, tool_use


@dataclass(frozen=True)
class Interface:
    """The differences between the interfaces that a conversation may come by."""

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
            unread if path is None else (replace(item, path=path, param=path) for item in unread)
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
            return replace(sampling, thinking=_for_engine(thinking, sampling, spec))

        if use is not None and use.spec is not None and body.allowed_token_ids is not None:
            raise RequestError(
                "allowed_token_ids alongside enforced tools may leave no token to emit: give one of "
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
        """`usage`, `metrics` and `timings`, once everything has finished."""
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


HARMONY_NAME = "thinking"  # of a message's thoughts, in gpt-oss's template
# variables of chat templates: Qwen's, GLM's; DeepSeek's, Granite's
SWITCHES = ("enable_thinking", "thinking")


async def render(
    served: Served,
    messages: list[Message],
    fields: TemplateFields,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    reasoning_effort: str | None = None,
    thinking: ThinkingFields | None = None,
) -> list[int]:
    """Token ids. Raises ApiError where the template cannot."""
    texts = served.texts
    options: dict[str, Any] = {**(fields.chat_template_kwargs or {})}
    if taken := sorted(set(options) & TAKEN):
        raise ApiError(
            f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs"
        )
    if reasoning_effort is not None:
        _check_known(texts, "reasoning_effort", served.name)
        options["reasoning_effort"] = reasoning_effort
    for name in fields.chat_template_kwargs or {}:
        _check_known(texts, name, served.name, "chat_template_kwargs")
    if thinking is not None:
        options |= _switched(thinking, served, options)
    if tools is not None:
        options["tools"] = list(tools)
    continues = bool(fields.continue_final_message)
    options["continue_final_message"] = continues
    options["add_generation_prompt"] = (
        not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    )
    return await texts.render([_turn(message, texts) for message in messages], **options)


def thinking_in(
    served: Served, body: ChatBody, prompt: list[int], *, is_held: bool
) -> ThinkingMarks | None:
    """The marks of thoughts in the answers; None: thoughts are not separated. `is_held`: a grammar
    waits for them to end.

    Raises ApiError for a budget or a form that does not fit these thoughts.
    """
    budget = body.budget
    if served.reasoning is None:
        if budget is not None:
            raise ApiError(
                f"'{served.name}' has no separate thoughts", param="thinking_token_budget"
            )
        return None
    last = (
        body.messages[-1].plain()["content"]
        if body.messages and body.continue_final_message
        else None
    )
    thinking = served.reasoning.thinking(served.texts, prompt, begun=last, budget=budget)
    if thinking is not None and is_held and thinking.is_open and not thinking.closing_ids:
        raise ApiError(
            f"the prompt of '{served.name}' opens thoughts that end with a text, after which no "
            "form can be enforced: switch "
            "thinking off ('chat_template_kwargs'), or leave out the form and required or strict "
            "tools"
        )
    return thinking


def _for_engine(
    thinking: ThinkingMarks | None, sampling: SamplingParams, form: Spec | None
) -> ThinkingMarks | None:
    """The thinking rules for the engine: where stop strings, a form or a budget look at thoughts,
    or the draft length does, which follows marks that are tokens."""
    if thinking is None or (form is not None and not thinking.closing_ids):
        return None
    return thinking if sampling.stop or thinking.closing_ids else None


def _switched(
    thinking: ThinkingFields, served: Served, options: Mapping[str, Any]
) -> dict[str, bool]:
    """Variables of the template that switch thinking on or off. Raises ApiError where it cannot be
    had as it is asked for."""
    if thinking.type == "adaptive":
        return {}
    is_on = thinking.type == "enabled"
    switches = [name for name in SWITCHES if name in served.texts.template_variables]
    if taken := [name for name in switches if name in options]:
        raise ApiError(
            f"'thinking' and '{taken[0]}' in 'chat_template_kwargs' are the same: give one of them",
            param="thinking",
        )
    if switches or is_on == (served.reasoning is not None):
        return dict.fromkeys(switches, is_on)
    why = (
        "has no separate thoughts"
        if is_on
        else "has a chat template without a switch that turns thinking off"
    )
    raise ApiError(f"thinking cannot be {thinking.type}: '{served.name}' {why}", param="thinking")


def _check_known(texts: SharedTokenizer, name: str, model: str, param: str | None = None) -> None:
    """A variable that the template never reads would be accepted and ignored."""
    if not reads(texts.chat_template or "", name):
        raise ApiError(f"the chat template of '{model}' knows no '{name}'", param=param or name)


def _turn(message: Message, texts: SharedTokenizer) -> dict[str, Any]:
    """One message for the template, thoughts included where it shows them."""
    turn = message.plain()
    if turn["role"] == "assistant" and message.thoughts is not None:
        names = _names_of_thoughts(texts)
        thoughts = message.thoughts
        # its template takes but one of the two
        if names == [HARMONY_NAME] and turn.get("tool_calls") and turn["content"]:
            thoughts = f"{thoughts}\n{turn['content']}".lstrip()
            turn["content"] = ""
        turn |= dict.fromkeys(names, thoughts)
    return turn


def unread_thoughts(messages: Sequence[Message] | None, served: Served) -> Iterator[UnknownField]:
    """Fields with thoughts that the model's chat template does not show."""
    shown = shows_thoughts(served)
    for number, message in enumerate(messages or ()):
        for name in REASONING:
            thought = getattr(message, name)
            if thought and not (
                shown and message.role == "assistant" and thought == message.thoughts
            ):
                why = (
                    "only texts of assistants are shown"
                    if shown
                    else f"the chat template of '{served.name}' shows none"
                )
                yield UnknownField(name, f"messages[].{name}", f"messages.{number}.{name}", (), why)


def shows_thoughts(served: Served) -> bool:
    """Whether the model's chat template shows what an assistant thought."""
    return bool(_names_of_thoughts(served.texts))


def _names_of_thoughts(texts: SharedTokenizer) -> list[str]:
    """Under which names the template reads them: as an attribute of a message, or as a text that is
    looked up in it."""
    template = texts.chat_template or ""
    names = [name for name in REASONING if re.search(rf"(\.|['\"]){name}\b", template)]
    return names or ([HARMONY_NAME] if f"message.{HARMONY_NAME}" in template else [])
