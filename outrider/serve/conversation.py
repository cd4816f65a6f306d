"""From a chat body to the prompt: messages as the model's own template renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.messages import TAKEN, as_turn, reads
from outrider.serve.errors import ApiError
from outrider.serve.schema.messages import Message, TemplateFields
from outrider.serve.served import Served
from outrider.serve.texts import Texts


async def render(
    served: Served, messages: list[Message], fields: TemplateFields, *, tools: Sequence[Mapping[str, Any]] | None = None,
    reasoning_effort: str | None = None,
) -> list[int]:  # fmt: skip
    """Token ids. Raises ApiError where the template cannot."""
    texts = served.texts
    options: dict[str, Any] = {**(fields.chat_template_kwargs or {})}
    if taken := sorted(set(options) & TAKEN):
        raise ApiError(f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs")
    if reasoning_effort is not None:
        _check_known(texts, "reasoning_effort", served.name)
        options["reasoning_effort"] = reasoning_effort
    for name in fields.chat_template_kwargs or {}:
        _check_known(texts, name, served.name, "chat_template_kwargs")
    if tools is not None:
        options["tools"] = list(tools)
    continues = bool(fields.continue_final_message)
    options["continue_final_message"] = continues
    options["add_generation_prompt"] = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    return await texts.render([as_turn(message.plain(), texts.chat_template or "") for message in messages], **options)


def _check_known(texts: Texts, name: str, model: str, param: str | None = None) -> None:
    """A variable that the template never reads would be accepted and ignored."""
    if not reads(texts.chat_template or "", name):
        raise ApiError(f"the chat template of '{model}' knows no '{name}'", param=param or name)
