"""What ended an answer, over HTTP: named as in vLLM, no part of the text unless asked for, and
never streamed first."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.serve.schema.answers import ChatAnswer, ChatChunk, CompletionAnswer
from tests.helpers import byte_tokenizer
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, events, serving
from tests.unit.serve.tools.test_over_http import CALLS, engine
from tests.unit.serve.written_tools import CLOSED, FORMATS, TOOLS, written

COMMA = byte_tokenizer()(",")["input_ids"][0]
ENDS: list[tuple[dict[str, Any], str, str, int | str | None]] = [
    ({}, "Hello, world", "stop", None),
    ({"max_tokens": 5}, "Hello", "length", None),
    ({"stop": ["x", "o, w"]}, "Hell", "stop", "o, w"),
    ({"stop": "o, w", "include_stop_str_in_output": True}, "Hello, w", "stop", "o, w"),
    ({"stop_token_ids": [COMMA]}, "Hello", "stop", COMMA),
    ({"stop_token_ids": [COMMA], "include_stop_str_in_output": True}, "Hello,", "stop", COMMA),
    ({"stop_token_ids": [COMMA], "stop": ["lo,"]}, "Hello", "stop", COMMA),
]


@pytest.mark.parametrize(("fields", "text", "reason", "by"), ENDS)
def test_completions_say_what_ended_them(
    fields: dict[str, Any], text: str, reason: str, by: int | str | None
) -> None:
    body = {"model": "fake", "prompt": "Say", "max_tokens": 50, **fields}
    with serving(FakeEngine()) as client:
        whole = client.post("/v1/completions", json=body)
        chunks = events(client.post("/v1/completions", json={**body, "stream": True}))
    CompletionAnswer.model_validate_json(whole.text, strict=True)
    (choice,) = whole.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, by)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == text
    assert [part["stop_reason"] for part in parts] == [None] * (len(parts) - 1) + [by]


@pytest.mark.parametrize(("fields", "text", "reason", "by"), ENDS)
def test_chats_say_what_ended_them(
    fields: dict[str, Any], text: str, reason: str, by: int | str | None
) -> None:
    with serving(FakeEngine()) as client:
        whole = client.post("/v1/chat/completions", json=chat(**fields))
        chunks = events(client.post("/v1/chat/completions", json=chat(**fields, stream=True)))
    ChatAnswer.model_validate_json(whole.text, strict=True)
    (choice,) = whole.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        text,
        reason,
        by,
    )
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["delta"].get("content", "") for part in parts) == text
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (reason, by)


def test_an_echoed_prompt_is_not_ended_by_the_token_that_nobody_sees() -> None:
    """With max_tokens 0 one token is generated all the same."""
    body = {
        "prompt": "Say",
        "max_tokens": 0,
        "echo": True,
        "stop_token_ids": byte_tokenizer()("H")["input_ids"],
    }
    with serving(FakeEngine()) as client:
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "Say",
        "length",
        None,
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", CLOSED)
def test_a_closing_mark_that_stops_the_answer_still_closes_the_call(
    name: str, skip: bool, special: bool, stream: bool
) -> None:
    """Catches a complete call that is called broken off because the text of its last token is
    hidden."""
    fake = engine(name, written(name, CALLS[:1]) + " and so on")
    mark = FORMATS[name].closing
    fake.tokenizer.add_tokens([mark], special_tokens=special)
    stop = fake.tokenizer.convert_tokens_to_ids(mark)
    with serving(fake) as client:
        body = chat(tools=TOOLS, stop_token_ids=[stop], skip_special_tokens=skip, stream=stream)
        answer = client.post("/v1/chat/completions", json=body)
        choices = (
            [chunk["choices"][0] for chunk in events(answer)]
            if stream
            else answer.json()["choices"]
        )
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("tool_calls", stop)
    assert not any(
        (choice.get("delta") or choice.get("message") or {}).get("content") for choice in choices
    )


def test_an_opening_mark_that_stops_the_answer_is_not_shown() -> None:
    """The mark is a special token that would be written out to begin a call."""
    fake = engine("hermes", "Let me look." + written("hermes", CALLS[:1]))
    fake.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    stop = fake.tokenizer.convert_tokens_to_ids("<tool_call>")
    with serving(fake) as client:
        (choice,) = client.post(
            "/v1/chat/completions", json=chat(tools=TOOLS, stop_token_ids=[stop])
        ).json()["choices"]
    assert choice["message"]["content"] == "Let me look."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_bad_words_are_looked_for_in_another_thread() -> None:
    """To find them reads the whole vocabulary, seconds for many words: in the event loop every
    stream would wait."""
    engine = FakeEngine()
    with serving(engine) as client:
        assert client.post(
            "/v1/completions", json={"prompt": "Say", "bad_words": ["x", "y"], "n": 3}
        ).is_success
        assert client.post("/v1/completions", json={"prompt": "Say"}).is_success
    ((words, thread),) = engine.prepared
    assert words == ["x", "y"]
    assert thread.name.startswith("asyncio"), "a worker of asyncio.to_thread"
