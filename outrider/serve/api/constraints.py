"""What form an answer must have: from a body's fields to a grammar for each engine request."""

from __future__ import annotations

import asyncio

from outrider.grammar import Spec
from outrider.sampling.constraint import Constraint
from outrider.serve.api.response_format import wanted_form
from outrider.serve.schema.chat import ChatBody
from outrider.serve.schema.sampling import GenerationFields
from outrider.serve.served import Served


def form_of(body: GenerationFields) -> Spec | None:
    """The form that an answer must have; None: any text. Raises RequestError for an impossible form, or two of them."""
    response_format = body.response_format if isinstance(body, ChatBody) else None
    return wanted_form(
        response_format=None if response_format is None else response_format.model_dump(by_alias=True, exclude_none=True),
        structured_outputs=body.structured_outputs,
        guided_json=body.guided_json,
        guided_regex=body.guided_regex,
        guided_choice=body.guided_choice,
        guided_grammar=body.guided_grammar,
        allowed_token_ids=body.allowed_token_ids,
    )


async def constraints(served: Served, spec: Spec | None, count: int) -> list[Constraint | None]:
    """A fresh grammar for each of `count` requests. Raises RequestError for one that is wrong."""
    if spec is None:
        return [None] * count
    # in a thread: one of them may compile, read the whole vocabulary, or wait for another that does
    return await asyncio.to_thread(lambda: [served.grammars.constraint(spec) for _ in range(count)])
