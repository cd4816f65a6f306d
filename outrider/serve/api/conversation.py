"""From a chat body to the prompt: messages as the model's own template renders them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.messages import TAKEN, reads
from outrider.sampling.thinking import ThinkingMarks
from outrider.serve.api.texts import SharedTokenizer
from outrider.serve.errors import ApiError
from outrider.serve.schema.base import UnknownField
from outrider.serve.schema.chat import ChatBody, ThinkingFields
from outrider.serve.schema.messages import REASONING, Message, TemplateFields
from outrider.serve.served import Served

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
