"""The form of an answer, in OpenAI's and vLLM's words, as one grammar `Spec`.

    spec = wanted_form(response_format={"type": "json_object"})          # None: any text
    grammars = Grammars(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)    # once per engine, outrider/grammar
    Request(..., constraint=None if spec is None else grammars.constraint(spec))      # fresh for every answer of n

`grammars.constraint` is where a wrong grammar is found: RequestError, beginning with the field's
name. Fields are plain JSON values (pydantic's `model_dump(by_alias=True, exclude_none=True)`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from outrider.errors import RequestError, did_you_mean
from outrider.grammar import Spec, choice, ebnf, form_of, json_object, regex, schema_form
from outrider.sampling.constraint import Constraint
from outrider.sampling.structured import StructuredOutputsParams
from outrider.serve.schema.chat import ChatBody
from outrider.serve.schema.sampling import GenerationFields
from outrider.serve.served import Served

# its own threads: others do not wait where clients send many
COMPILING = ThreadPoolExecutor(16, "compiling a grammar")
FORMATS = ("text", "json_object", "json_schema")


def wanted_form(
    *,
    response_format: Mapping[str, Any] | None = None,
    structured_outputs: Mapping[str, Any] | None = None,
    guided_json: Any = None,
    guided_regex: str | None = None,
    guided_choice: list[str] | None = None,
    guided_grammar: str | None = None,
    allowed_token_ids: list[int] | None = None,
) -> Spec | None:
    """The one form that is asked for. Raises RequestError or ConfigError for two, for an unknown
    one, and alongside `allowed_token_ids`."""
    form = {
        "response_format": None if response_format is None else _response_format(response_format),
        "structured_outputs": None
        if structured_outputs is None
        else _structured(structured_outputs),
        "guided_json": None if guided_json is None else schema_form(guided_json, "guided_json"),
        "guided_regex": None if guided_regex is None else regex(guided_regex, "guided_regex"),
        "guided_choice": None if guided_choice is None else choice(guided_choice, "guided_choice"),
        "guided_grammar": None
        if guided_grammar is None
        else ebnf(guided_grammar, "guided_grammar"),
    }
    asked = {name: spec for name, spec in form.items() if spec is not None}
    if len(asked) > 1:
        raise RequestError(f"{' and '.join(asked)} each ask for a form of the answer: give one")
    if asked and allowed_token_ids is not None:
        raise RequestError(
            f"allowed_token_ids alongside {next(iter(asked))}: together they may leave no token. "
            "Give one"
        )
    return next(iter(asked.values()), None)


def _response_format(wanted: Mapping[str, Any]) -> Spec | None:
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object("response_format")
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {json.dumps(kind)}.{did_you_mean(str(kind), FORMATS)}"
        )
    named = wanted.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise RequestError("response_format.json_schema must be an object with 'name' and 'schema'")
    return schema_form(named["schema"], "response_format.json_schema.schema")


def _structured(wanted: Mapping[str, Any]) -> Spec:
    """vLLM's `structured_outputs`."""
    known = [field.name for field in fields(StructuredOutputsParams)]
    given = {name: value for name, value in wanted.items() if name in known}
    unknown = sorted(
        name
        for name in set(wanted) - set(known)
        if wanted[name] is not None and wanted[name] is not False
    )
    if unknown:
        raise RequestError(
            f"structured_outputs.{unknown[0]} is not known.{did_you_mean(unknown[0], known)}"
        )
    return form_of(StructuredOutputsParams(**given))


def form_asked(body: GenerationFields) -> Spec | None:
    """The form that an answer must have; None: any text. Raises RequestError for an impossible
    form, or two of them."""
    response_format = body.response_format if isinstance(body, ChatBody) else None
    return wanted_form(
        response_format=None
        if response_format is None
        else response_format.model_dump(by_alias=True, exclude_none=True),
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

    def make() -> list[Constraint | None]:
        return [served.grammars.constraint(spec) for _ in range(count)]

    if served.grammars.has(spec):
        return make()
    # or it waits for another that compiles the same
    return await asyncio.get_running_loop().run_in_executor(COMPILING, make)
