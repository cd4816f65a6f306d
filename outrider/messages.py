"""Conversations: messages as callers give them, checked, and rendered by the model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from outrider.errors import ConfigError, RequestError
from outrider.templates import conversation_text, takes_parts
from outrider.wellformed import checked_text, is_text, parsed_json

Message = Mapping[str, Any]
SHOWN = 60  # characters of a wrong value or name in a message
MARKS = frozenset(("role", "content"))  # keys of a message that no prompt has
TAKEN = frozenset((  # set by options of their own: in chat_template_kwargs they would be ignored
    "messages", "tools", "tokenize", "return_dict", "conversation", "chat_template", "add_generation_prompt",
    "continue_final_message",
))  # fmt: skip


def read_conversations(given: Any) -> list[list[dict[str, Any]]]:
    """One conversation (a list of messages) or a list of conversations, always as a list of
    conversations.

    Raises RequestError for what is none.
    """
    items = _listed(given, "messages")
    if items and all(isinstance(item, Mapping) for item in items):
        return [_conversation(items, "conversation 0")]
    return [
        _conversation(_listed(item, f"conversation {number}"), f"conversation {number}")
        for number, item in enumerate(items)
    ]


def holds_messages(given: Any) -> bool:
    """Whether a list holds messages, or conversations, rather than prompts."""
    return isinstance(given, list | tuple) and any(
        holds_messages(item) or (isinstance(item, Mapping) and not MARKS.isdisjoint(item))
        for item in given
    )


def _listed(given: Any, called: str) -> list[Any]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise RequestError(
            f"{called} must be a list of messages like {{'role': 'user', 'content': '...'}}, got "
            f"{type(given).__name__}"
        )
    return list(given)


def _conversation(messages: list[Any], called: str) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError(f"{called} has no messages: there is nothing to answer")
    return [
        _message(message, f"message {number} of {called}")
        for number, message in enumerate(messages)
    ]


def _message(message: Any, called: str) -> dict[str, Any]:
    """A copy with the content as one text."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{called} must be a dictionary with 'role' and 'content', got {type(message).__name__}"
        )
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{called} needs a 'role' like 'user', got {message.get('role')!r}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"{called} needs 'content'")
    return {**message, "content": checked_text(f"the content of {called}", _text(content, called))}


def _text(content: Any, called: str) -> str:
    """The content of a message: a text, or pieces of one."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise RequestError(f"the content of {called} must be text, got {type(content).__name__}")
    for part in content:
        if not (
            isinstance(part, Mapping)
            and isinstance(part.get("text"), str)
            and part.get("type", "text") == "text"
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"the content of {called} has a part of type {kind!r}; models are given text only "
                "here"
            )
    return "".join(part["text"] for part in content)


class CallError(RequestError):
    """A chat template refused a call in the history whose arguments are no JSON object, as where it
    was cut off."""

    def __init__(
        self, message: int, call: Mapping[str, Any], why: Exception, *, place: str = ""
    ) -> None:
        """`message`: its number in the conversation. `place`: what to call that message, where its
        number is not the client's."""
        function = call["function"]
        super().__init__(
            f"{place or f'message {message}'} has a call of '{str(function.get('name'))[:SHOWN]}' "
            "whose arguments cannot be read "
            f"as a JSON object, and the chat template refuses them ({why}): got "
            f"{_shown(function['arguments'])}, expected the "
            'like of {"name": "value"}; complete them, or leave out the call and its result'
        )
        self.message = message
        self.call = call
        self.why = why

    def at(self, place: str) -> CallError:
        """This error about a message that the client knows as `place`."""
        return CallError(self.message, self.call, self.why, place=place)


class Reader(Protocol):
    """Reads conversations otherwise than the tokenizer does."""

    def render(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any], apply: Callable[..., str]
    ) -> list[int]:
        """Token ids of a conversation that `apply` writes as a text."""
        ...


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    template: str,
    *,
    reader: Reader | None = None,
    **options: Any,
) -> list[int]:
    """Token ids of a conversation in the words of a chat template. `options`: those of
    `conversation_text`.

    Most templates look into the arguments of calls or write them as JSON; where one fails with
    objects, as DeepSeek's, which join texts, it is given the text that the model wrote. Raises
    CallError or RequestError for what it takes in neither form.
    """

    def encoded(conversation: Sequence[Message], *, as_text: bool = False) -> list[int]:
        turns = [as_turn(message, template, as_text=as_text) for message in conversation]
        write = partial(conversation_text, tokenizer)
        if reader is not None:
            tokens = reader.render(turns, options, write)
        else:
            tokens = list(
                tokenizer(write(turns, **options), add_special_tokens=False, verbose=False)[
                    "input_ids"
                ]
            )
        if not tokens:
            raise ValueError("it renders nothing of them")
        return tokens

    try:
        return encoded(messages)
    except Exception as error:  # noqa: BLE001  templates are programs that come with the model
        why = error
    calls = [
        (number, call)
        for number, message in enumerate(messages)
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        with suppress(Exception):
            return encoded(messages, as_text=True)
    if broken := [(number, call) for number, call in calls if _is_broken(call)]:
        try:
            encoded([_without_broken(message) for message in messages])
        except Exception:  # noqa: BLE001  it refuses the messages for another reason, which `why` may be
            pass
        else:
            raise CallError(*broken[0], why) from why
    raise RequestError(f"the chat template refused the messages: {why}") from why


def _without_broken(message: Message) -> Message:
    """A message whose broken calls have no arguments, to see whether it is they that a template
    refuses."""
    calls = [
        {**call, "function": {**call["function"], "arguments": {}}} if _is_broken(call) else call
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _is_broken(call: Any) -> bool:
    function = _function_of(call)
    return function is not None and not isinstance(_parsed(function["arguments"]), Mapping)


def as_turn(message: Message, template: str, *, as_text: bool = False) -> dict[str, Any]:
    """A message as the chat template expects it: in pieces, OpenAI's newer roles under older names,
    null arguments of calls as the empty object they mean. `as_text`: arguments are JSON, not
    objects."""
    turn = dict(message)
    if isinstance(turn.get("content"), str) and takes_parts(template):
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    if turn["role"] == "developer" and "developer" not in template:
        turn["role"] = "system"  # OpenAI's newer name for the same
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_call(call, as_text=as_text) for call in turn["tool_calls"]]
    return turn


def _call(call: Any, *, as_text: bool) -> Any:
    function = _function_of(call)
    if function is None:
        return call
    arguments = _parsed(function["arguments"])
    if as_text and arguments != {}:
        arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _function_of(call: Any) -> Mapping[str, Any] | None:
    """The function that a call names, with "arguments"; None for an entry that calls no
    function."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return {"arguments": None, **function} if isinstance(function, Mapping) else None


def _parsed(arguments: Any) -> Any:
    """The value of arguments, an empty object for none. Text that is no JSON, or JSON with half a
    character in it, which no tokenizer takes, is left as the model wrote it."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = parsed_json(arguments.strip() or "{}")
    except ValueError:
        return arguments
    is_readable = is_text(json.dumps(value, ensure_ascii=False))
    return ({} if value is None else value) if is_readable else arguments


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template, all of them where it has several; empty: it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def reads(template: str, name: str) -> bool:
    """Whether the template looks at a variable: one that it never reads would be accepted and
    ignored."""
    # 'thinking' is not 'enable_thinking'
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def render(
    tokenizer: Any,
    model: str,
    messages: list[dict[str, Any]],
    *,
    chat_template: str | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    tools: list[Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[int]:
    """Token ids of one conversation. `add_generation_prompt` None: unless the final message is
    continued.

    Raises ConfigError for options that the template cannot honour, RequestError where it refuses
    the messages.
    """
    template = template_text(tokenizer) if chat_template is None else chat_template
    if not template:
        raise ConfigError(f"'{model}' has no chat template; use generate with a plain prompt")
    if continue_final_message and add_generation_prompt:
        raise ConfigError(
            "continue_final_message and add_generation_prompt contradict each other: leave one of "
            "them out"
        )
    variables = dict(chat_template_kwargs or {})
    if taken := sorted(set(variables) & TAKEN):
        raise ConfigError(
            f"chat_template_kwargs cannot set {', '.join(taken)}: they are arguments of their own"
        )
    for name in [*variables, *(["tools"] if tools else [])]:
        if not reads(template, name):
            raise ConfigError(f"the chat template of '{model}' knows no '{name}': leave it out")
    begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    return encode_conversation(
        tokenizer,
        messages,
        template,
        tools=tools or None,
        chat_template=chat_template,
        add_generation_prompt=begins,
        continue_final_message=continue_final_message,
        **variables,
    )
