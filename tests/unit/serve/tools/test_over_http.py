"""Tools over HTTP, for every way of writing calls: whole or streamed, right or wrong, a client gets
an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.serve.schema.answers import ChatAnswer, ChatChunk
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, error_of, events, serving
from tests.unit.serve.written_tools import BARE, FORMATS, TEMPLATES, TOOLS, Call, written

URL = "/v1/chat/completions"
CALLS: list[Call] = [("weather", {"city": "Orléans 🌧\n", "days": 2}), ("now", {})]


def engine(name: str, reply: str) -> FakeEngine:
    made = FakeEngine(reply=reply, context=2000)
    made.tokenizer.chat_template += f"{{# {TEMPLATES[name]} #}}"
    return made


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_answers(name: str) -> None:
    text = "" if name in BARE else "Let me look."
    with serving(engine(name, text + written(name, CALLS))) as client:
        whole = client.post(URL, json=chat(tools=TOOLS))
        chunks = events(client.post(URL, json=chat(tools=TOOLS, stream=True)))
    ChatAnswer.model_validate_json(whole.text, strict=True)
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (text or None)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    streamed: list[dict[str, str]] = []
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        for part in chunk["choices"][0]["delta"].get("tool_calls", []):
            if "id" in part:
                streamed.append({"name": part["function"]["name"], "arguments": ""})
            assert part["index"] == len(streamed) - 1
            streamed[-1]["arguments"] += part["function"]["arguments"]
    assert streamed == calls
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.markers])
def test_marks_that_are_special_tokens(name: str, skip: bool) -> None:
    """Left out of the text or shown in it, as the client wants: its calls are read all the same.
    Guards against marks that are there twice."""
    fake = engine(name, written(name, CALLS))
    fake.tokenizer.add_special_tokens({"additional_special_tokens": list(FORMATS[name].markers)})
    with serving(fake) as client:
        (choice,) = client.post(URL, json=chat(tools=TOOLS, skip_special_tokens=skip)).json()[
            "choices"
        ]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_half_a_call_is_an_answer_too(name: str, stream: bool) -> None:
    """Catches a 500, and a client asked to run a tool whose arguments broke off."""
    text = written(name, CALLS[:1])
    with serving(engine(name, text[: len(text) * 3 // 5])) as client:
        answer = client.post(URL, json=chat(tools=TOOLS, stream=stream))
        choices = (
            [chunk["choices"][0] for chunk in events(answer)]
            if stream
            else answer.json()["choices"]
        )
    assert answer.status_code == 200
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", FORMATS)
def test_strict_and_required_tools_are_grammars(name: str) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    asked: list[dict[str, Any]] = [
        {"tools": strict},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS},
    ]
    fake = engine(name, written(name, CALLS[:1]))
    with serving(fake) as client:
        for fields in asked:
            assert client.post(URL, json=chat(**fields)).status_code == 200
    assert [request.constraint is not None for request in fake.seen] == [True, True, False]


def test_a_schema_that_calls_cannot_follow_is_a_400() -> None:
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    with serving(engine("qwen3-coder", "x")) as client:
        assert "'format'" in error_of(client.post(URL, json=chat(tools=tools)), 400)["message"]
        wrong = [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]
        assert (
            "properties must be an object"
            in error_of(client.post(URL, json=chat(tools=wrong)), 400)["message"]
        )
