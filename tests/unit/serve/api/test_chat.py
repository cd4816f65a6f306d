"""/v1/chat/completions over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.serve.schema.answers import ChatAnswer, ChatChunk
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, error_of, events, serving

URL = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def ask(engine: FakeEngine, body: dict[str, Any]) -> dict[str, Any]:
    with serving(engine) as client:
        response = client.post(URL, json=body)
        assert response.status_code == 200, response.text
        ChatAnswer.model_validate_json(response.text, strict=True)
        return response.json()


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1].prompt)


def test_answer_has_openais_shape() -> None:
    engine = FakeEngine()
    answer = ask(engine, chat())
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert prompt_of(engine) == "<user>Hi<assistant>"
    assert engine.seen[0].params.max_tokens == 200 - len(engine.seen[0].prompt)


def test_messages_are_rendered_by_the_models_template() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}],
        },
    ]
    ask(
        engine,
        {
            "messages": messages,
            "chat_template_kwargs": {"shout": True},
            "add_generation_prompt": False,
        },
    )
    assert prompt_of(engine) == "<system>Be brief.<user>What is this?!"


def test_final_message_can_be_continued() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    ask(engine, {"messages": messages, "continue_final_message": True})
    assert prompt_of(engine) == "<user>Hi<assistant>Well,"


def test_token_ids_instead_of_messages() -> None:
    engine = FakeEngine()
    answer = ask(engine, {"prompt_token_ids": [5, 6], "return_token_ids": True})
    assert engine.seen[0].prompt == [5, 6]
    assert answer["prompt_token_ids"] == [5, 6]
    assert len(answer["choices"][0]["token_ids"]) == 13


def test_logprobs_have_bytes_and_exactly_so_many_alternatives() -> None:
    content = ask(FakeEngine(reply="é"), chat(logprobs=True, top_logprobs=2))["choices"][0][
        "logprobs"
    ]["content"]
    assert [entry["bytes"] for entry in content[:2]] == [[0xC3], [0xA9]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(set(entry["top_logprobs"][0]) == {"token", "logprob", "bytes"} for entry in content)


def test_several_answers_have_seeds_of_their_own() -> None:
    engine = FakeEngine(reply=lambda request: str(request.params.seed))
    answer = ask(engine, chat(n=3, seed=5))
    assert [c["message"]["content"] for c in answer["choices"]] == ["5", "6", "7"]


def test_newer_name_of_the_limit() -> None:
    engine = FakeEngine()
    assert ask(engine, chat(max_completion_tokens=3))["choices"][0]["finish_reason"] == "length"


def test_the_stop_string_shows_where_it_is_wanted() -> None:
    answer = ask(FakeEngine(), chat(stop="wor", include_stop_str_in_output=True))
    assert answer["choices"][0]["message"]["content"] == "Hello, wor"
    assert ask(FakeEngine(), chat(stop="wor"))["choices"][0]["message"]["content"] == "Hello, "


def test_a_form_becomes_a_grammar_of_each_answers_own() -> None:
    engine = FakeEngine()
    ask(engine, chat(n=2, response_format={"type": "json_object"}))
    first, second = (request.constraint for request in engine.seen)
    assert first is not None
    assert first is not second
    assert not first.allowed([[]])[0].all()


def test_wrong_schema_is_the_clients_mistake() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    with serving(FakeEngine()) as client:
        error = error_of(client.post(URL, json=chat(response_format=form)), 400)
    assert "strange" in error["message"]


class TestTools:
    CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

    @staticmethod
    def engine(reply: str) -> FakeEngine:
        engine = FakeEngine(reply=reply, context=2000)
        engine.tokenizer.chat_template += (
            "{# <tool_call> {'name': ..., 'arguments': ...} </tool_call> #}"
        )
        return engine

    def test_call_is_read_back(self) -> None:
        engine = self.engine(self.CALL)
        choice = ask(engine, chat(tools=[WEATHER]))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
        assert "[1 tools]" in prompt_of(engine)

    def test_call_is_streamed(self) -> None:
        with serving(self.engine(self.CALL)) as client:
            chunks = events(client.post(URL, json=chat(tools=[WEATHER], stream=True)))
        for chunk in chunks:
            ChatChunk.model_validate(chunk)
        parts = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", [])]
        assert json.loads("".join(part["function"].get("arguments", "") for part in parts)) == {
            "city": "Oslo"
        }
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    def test_text_stays_text(self) -> None:
        choice = ask(self.engine("No need."), chat(tools=[WEATHER]))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("No need.", "stop")

    def test_required_call_is_a_grammar(self) -> None:
        engine = self.engine(self.CALL)
        ask(engine, chat(tools=[WEATHER], tool_choice="required"))
        assert engine.seen[0].constraint is not None

    def test_messages_with_calls_are_rendered(self) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ]
        engine = self.engine("ok")
        ask(engine, {"messages": messages, "tools": [WEATHER]})
        assert "<tool>rain" in prompt_of(engine)


class TestStream:
    def test_pieces_make_the_whole(self) -> None:
        body = chat(
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            return_token_origins=True,
            n=2,
        )
        with serving(FakeEngine(reply="Grüße")) as client:
            *chunks, last = events(client.post(URL, json=body))
        for chunk in [*chunks, last]:
            ChatChunk.model_validate(chunk)
        for index in (0, 1):
            own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"].get("content", "") for c in own) == "Grüße"
            assert own[-1]["finish_reason"] == "stop"
            assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
            assert (
                len([entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]])
                == 8
            )
            assert "".join(piece for c in own for piece, _ in c.get("token_origins", [])) == "Grüße"
        assert last["usage"]["completion_tokens"] == 16
        assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 8

    def test_time_limit_ends_the_text_as_a_length(self) -> None:
        engine = FakeEngine(reply="abc")
        engine.late = True
        choice = ask(engine, chat())["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")


def test_an_event_is_one_line_for_clients_that_split_as_python_does() -> None:
    """httpx's `iter_lines` ends a line at these characters, too, and would cut an event in two."""
    text = "a\u2028b\u2029c\x85d \u00e9"
    with serving(FakeEngine(reply=text)) as client:
        lines = client.post(URL, json=chat(stream=True)).text.splitlines()
        whole = client.post(URL, json=chat()).json()["choices"][0]["message"]["content"]
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in lines
        if line and not line.endswith("[DONE]")
    ]
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        == whole
        == text
    )


@pytest.mark.parametrize("role", ["user", "tool"])
def test_template_that_raises_is_a_400(role: str) -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    body = {
        "messages": [
            {"role": role, "content": "x", **({"tool_call_id": "1"} if role == "tool" else {})}
        ]
    }
    with serving(engine) as client:
        assert "roles must alternate" in error_of(client.post(URL, json=body), 400)["message"]
