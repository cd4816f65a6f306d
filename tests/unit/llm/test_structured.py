"""`SamplingParams.structured_outputs`: answers of `LLM` that follow a schema, a pattern, a list or
a grammar, drafts or none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, StructuredOutputsParams
from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import Request
from outrider.errors import ConfigError, RequestError
from tests.unit.engine.conftest import Answer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(byte_model: Path) -> LLM:
    return LLM(byte_model, drafter="suffix")


def wanted(temperature: float = 1.0, **form: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=3,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(**form),
    )


def test_every_row_follows_its_own_form(llm: LLM) -> None:
    """Catches a form that is ignored, and one that another row of the batch follows."""
    asked = [
        wanted(json=SCHEMA),
        wanted(regex="[0-9]{3}"),
        wanted(choice=["yes", "no"]),
        wanted(grammar='root ::= "ab" | "ba"'),
        wanted(0.0, json=json.dumps(SCHEMA), disable_any_whitespace=True),
        SamplingParams(max_tokens=4, ignore_eos=True),
    ]
    schema, digits, word, letters, tight, free = llm.generate(["abc"] * len(asked), asked)
    assert isinstance(json.loads(schema.text)["a"], bool)
    assert re.fullmatch("[0-9]{3}", digits.text)
    assert word.text in ("yes", "no")
    assert letters.text in ("ab", "ba")
    assert tight.text in ('{"a":true}', '{"a":false}')
    assert len(free.token_ids) == 4
    assert {done.finish_reason for done in (schema, digits, word, letters, tight)} == {"stop"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("text", ["<|end|>no", "a<|end|>b"])
def test_a_form_may_have_the_text_of_the_end_token_in_it(
    llm: LLM, text: str, temperature: float
) -> None:
    """Catches an answer that ends in the middle of its form, and one refused because the token is
    no text."""
    forms: list[dict[str, Any]] = [
        {"choice": [text]},
        {"regex": text.replace("|", "[|]")},
        {"json": {"const": text}},
    ]
    asked = [wanted(temperature, **form) for form in forms]
    for done, expected in zip(
        llm.generate(["abc"] * 3, asked), (text, text, json.dumps(text)), strict=True
    ):
        assert done.text == expected
        assert done.finish_reason == "stop"


def test_stream_and_every_answer_follow_the_form(llm: LLM) -> None:
    assert "".join(chunk.text for chunk in llm.stream("abc", wanted(choice=["yes", "no"]))) in (
        "yes",
        "no",
    )
    several = SamplingParams(
        temperature=1.0, n=3, structured_outputs=StructuredOutputsParams(regex="[xy]{5}")
    )
    for done in llm.generate("abc", several)[0].outputs:
        assert re.fullmatch("[xy]{5}", done.text)


def test_the_engine_takes_it_too(byte_model: Path) -> None:
    engine = make_engine(Options(str(byte_model), drafter="ngram"))
    engine.start()
    try:
        answer = Answer()
        engine.submit(Request(id="a", prompt=[70], params=wanted(regex="[0-9]{3}")), answer)
        assert re.fullmatch("[0-9]{3}", answer.text)
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"choice": "yes"}, "structured_outputs.choice must be a list, got 'yes'"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json is no JSON"),
        ({"regex": 3}, "structured_outputs.regex must be a text, got 3"),
        ({"regex": False}, "structured_outputs.regex must be a text, got False"),
        ({"choice": False}, "structured_outputs.choice must be a list, got False"),
        (
            {"json": {}, "whitespace_pattern": False},
            "structured_outputs.whitespace_pattern must be a text, got False",
        ),
        ({"json": False, "regex": "a"}, "got json, regex"),
        ({"json_object": False}, "got none"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "structured_outputs.regex has no white space of its own",
        ),
    ],
)
def test_a_wrong_form_is_refused_when_it_is_made(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        StructuredOutputsParams(**form)


def test_a_schema_may_be_true_or_false(llm: LLM) -> None:
    """Catches the schema that nothing fulfils taken for none, and an answer without a form where
    one was asked for."""
    (answer,) = llm.generate(["abc"], wanted(json=True))[0].outputs
    json.loads(answer.text)
    with pytest.raises(
        RequestError, match=r"^structured_outputs\.json is false, a schema that no answer fulfils"
    ):
        llm.generate("abc", wanted(json=False))


def test_what_is_no_form(llm: LLM) -> None:
    given: Any = {"regex": "a"}
    with pytest.raises(
        ConfigError, match=r"structured_outputs must be StructuredOutputsParams, got \{'regex'"
    ):
        SamplingParams(structured_outputs=given)
    with pytest.raises(ConfigError, match="allowed_token_ids with structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), allowed_token_ids=[1])
    with pytest.raises(
        RequestError, match=r"structured_outputs\.json\.properties\.a: .*uniqueItems"
    ):
        llm.generate("abc", wanted(json={"properties": {"a": {"uniqueItems": True}}}))
