"""Tools through the `openai` package: the demo's target with a chat template that renders tools, as
Hermes and Qwen write them.

The model never learnt to call anything: every call here is one that the grammar brought about,
drafted paths included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai")

import openai

from outrider.demo import DEMO_PROMPTS
from tests.live_server import KEY, live_demo

pytestmark = pytest.mark.slow

TEMPLATE = """\
{%- if tools %}Tools, called as <tool_call>{"name": NAME, "arguments": {}}</tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif -%}
{%- for message in messages %}{{ message.content }}
{% endfor %}Answer:"""
SUBTRACT = {
    "type": "function",
    "function": {
        "name": "subtract",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"enum": [18, 37]},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"fruit": {"enum": ["lemon", "apple"]}},
            "required": ["fruit"],
            "additionalProperties": False,
        },
    },
}
PARAMETERS: dict[str, Any] = {"subtract": {"a", "b"}, "look_up": {"fruit"}}
SPECULATION = [
    {},
    {"speculation": {"mode": "fixed", "max_draft_tokens": 4}},
    {"speculation": {"mode": "off"}},
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: Any) -> Iterator[Any]:
    with live_demo(tmp_path_factory.mktemp("model") / "caller", TEMPLATE, "caller") as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120)


def call(client: Any, **fields: Any) -> Any:
    fields = {
        "tools": [SUBTRACT, LOOK_UP],
        "temperature": 0,
        "max_completion_tokens": 300,
        "parallel_tool_calls": False,
    } | fields
    message = {"role": "user", "content": DEMO_PROMPTS[0]}
    return client.chat.completions.create(model="caller", messages=[message], **fields)


def called(answer: Any) -> tuple[str, dict[str, Any]]:
    """The only call of an answer."""
    (one,) = answer.choices[0].message.tool_calls
    assert one.type == "function"
    assert one.id
    return one.function.name, json.loads(one.function.arguments)


@pytest.mark.parametrize("extra", SPECULATION, ids=["auto", "fixed", "off"])
def test_a_required_call_is_a_call(client: Any, extra: dict[str, Any]) -> None:
    """A draft path that the grammar did not see ends in arguments no program can read."""
    answer = call(client, tool_choice="required", extra_body=extra)
    name, arguments = called(answer)
    assert set(arguments) == PARAMETERS[name]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_the_named_tool_is_called(client: Any) -> None:
    name, arguments = called(
        call(client, tool_choice={"type": "function", "function": {"name": "look_up"}})
    )
    assert name == "look_up"
    assert arguments["fruit"] in ("lemon", "apple")


def test_same_call_with_and_without_speculation(client: Any) -> None:
    """Greedy and seeded, under a grammar."""
    for fields in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
        calls = [
            called(call(client, tool_choice="required", extra_body=extra, **fields))
            for extra in SPECULATION
        ]
        assert calls[0] == calls[1] == calls[2]


def test_a_streamed_call_is_the_same_call(client: Any) -> None:
    """Arguments in pieces, under one index and one id."""
    whole = called(call(client, tool_choice="required"))
    chunks = list(call(client, tool_choice="required", stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert {part.index for part in parts} == {0}
    assert len({part.id for part in parts if part.id}) == 1
    name = "".join(part.function.name or "" for part in parts)
    assert (name, json.loads("".join(part.function.arguments or "" for part in parts))) == whole
    assert [
        chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason
    ] == ["tool_calls"]


def test_tools_that_may_not_be_called(client: Any) -> None:
    answer = call(client, tool_choice="none", max_completion_tokens=20)
    assert not answer.choices[0].message.tool_calls
    assert answer.choices[0].message.content


def test_a_tool_that_is_not_there_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="subtract"):
        call(client, tool_choice={"type": "function", "function": {"name": "substract"}})
