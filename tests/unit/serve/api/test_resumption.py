"""Streams that another server continues: wherever one breaks off, both parts together are the
undisturbed stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.serve.app import make_app
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.serve.fake_engine import FakeEngine, engine
from tests.unit.serve.served_app import chat, error_of, serving, state_of
from tests.unit.serve.written_tools import FORMATS, TEMPLATES, TOOLS, Call, written

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CALLS: list[Call] = [("weather", {"city": "Orléans 🌧\n", "days": 2}), ("now", {})]
MARK = ": resume "


def blocks_of(client: TestClient, url: str, body: dict[str, Any]) -> list[str]:
    """Events and marks of a stream, in their order, the end included."""
    response = client.post(url, json=body)
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    return blocks[:-1]


def events_of(blocks: list[str]) -> list[dict[str, Any]]:
    return [
        json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: {")
    ]


def marks_of(blocks: list[str]) -> list[dict[str, Any]]:
    return [json.loads(block.removeprefix(MARK)) for block in blocks if block.startswith(MARK)]


def without_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events of which only what must be the same is left: ids of calls, times and cached tokens
    differ from server to server."""
    for event in events:
        event.get("metrics", {}).pop("timing", None)
        event.get("metrics", {}).pop("preemptions", None)
        event.get("metrics", {}).pop("speculative_decoding", None)
        event.get("usage", {}).pop("prompt_tokens_details", None)
        event.pop("timings", None)  # of what each server did
        for choice in event["choices"]:
            for call in choice.get("delta", {}).get("tool_calls", []):
                call.pop("id", None)
    return events


def continued(
    client: TestClient, url: str, body: dict[str, Any], whole: list[str], cut: int
) -> list[dict[str, Any]]:
    """The events of a stream that broke off after `cut` of its blocks, and of its continuation, as
    a reader gets them."""
    last = max(number for number in range(cut) if whole[number].startswith(MARK))
    seen = whole[: last + 1]
    head, *marks = marks_of(seen)
    rest = blocks_of(client, url, {**body, "resume": {**head, "marks": marks}})
    events = events_of(seen) if marks else []
    return events + events_of(rest)


def texts_of(events: list[dict[str, Any]]) -> list[str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


def lists_of(events: list[dict[str, Any]], name: str) -> list[Any]:
    """One list of the log-probabilities of the first answer, all events together."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    return [value for choice in choices for value in (choice["logprobs"] or {}).get(name, [])]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("resume")
    target = save_checkpoint(folder / "target", tiny_llama(257, sharpness=4.0), byte_tokenizer())
    made = make_engine(
        Options(str(target), drafter="ngram"), EngineSettings(kv_memory=16 << 20), name="tiny"
    )
    made.start()
    with TestClient(make_app(state_of(made)), raise_server_exceptions=False) as client:
        yield client
    made.stop()


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 5},
    "penalties": {
        "temperature": 0,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "stop": {
        "temperature": 0.9,
        "seed": 2,
        "stop": ["q", "zz"],
        "include_stop_str_in_output": True,
    },
    "several": {"temperature": 0.8, "seed": 3, "n": 3},
    "prompts": {"temperature": 0, "prompt": ["one", "another one"]},
    "logprobs": {"temperature": 0.7, "seed": 4, "logprobs": 3},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
    "grammar": {"temperature": 0.9, "seed": 6, "structured_outputs": {"regex": "[a-c]{5,30}d"}},
    "at least": {"temperature": 0.9, "seed": 7, "min_tokens": 20},
}


@pytest.mark.parametrize("name", BODIES)
def test_a_continued_completion_is_the_undisturbed_one(client: TestClient, name: str) -> None:
    """Text, log-probabilities, offsets, counts and ids, cut anywhere."""
    body = {
        "model": "tiny",
        "prompt": "Once upon a time",
        "max_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True},
        "resume": {},
        **BODIES[name],
    }
    whole = blocks_of(client, COMPLETIONS, body)
    expected = events_of(whole)
    for cut in range(1, len(whole), 3):
        events = continued(client, COMPLETIONS, body, whole, cut)
        assert texts_of(events) == texts_of(expected)
        for part in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert lists_of(events, part) == lists_of(expected, part)
        assert {event["id"] for event in events} == {
            event["id"] for event in expected if cut > 1
        } or cut == 1
        for field in ("prompt_tokens", "completion_tokens"):
            assert events[-1]["usage"][field] == expected[-1]["usage"][field]
        ends = [
            choice["finish_reason"]
            for event in events
            for choice in event["choices"]
            if choice["finish_reason"]
        ]
        assert ends == [
            c["finish_reason"] for event in expected for c in event["choices"] if c["finish_reason"]
        ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_continued_answer_with_calls_is_the_undisturbed_one(name: str) -> None:
    """Event for event: what reads calls stands where it stood."""
    fake = FakeEngine(reply="Let me look. " + written(name, CALLS), context=2000)
    fake.tokenizer.chat_template += f"{{# {TEMPLATES[name]} #}}"
    body = chat(tools=TOOLS, stream=True, stream_options={"include_usage": True}, resume={})
    with serving(fake) as client:
        whole = blocks_of(client, CHAT, body)
        expected = without_times(events_of(whole))
        for cut in range(2, len(whole), 5):
            events = continued(client, CHAT, body, whole, cut)
            if cut > 2:
                assert without_times(events) == expected


def test_a_continued_answer_with_thoughts_is_the_undisturbed_one() -> None:
    body = chat(
        stream=True,
        stream_options={"include_usage": True},
        resume={},
        stop=["end"],
        logprobs=True,
        top_logprobs=2,
    )
    with serving(engine("<think>first\n\nthis </think>\n\nthen that. The end")) as client:
        whole = blocks_of(client, CHAT, body)
        expected = without_times(events_of(whole))
        assert any(
            "reasoning" in choice["delta"] for event in expected for choice in event["choices"]
        )
        for cut in range(5, len(whole)):
            assert without_times(continued(client, CHAT, body, whole, cut)) == expected


def test_counts_of_speculation_are_those_of_all_servers(client: TestClient) -> None:
    """Steps and tokens of the part that was lost are in the sum."""
    body = {
        "model": "tiny",
        "prompt": "abc abc abc abc",
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "resume": {},
    }
    whole = blocks_of(client, COMPLETIONS, body)
    number = len(whole) // 2
    counts = continued(client, COMPLETIONS, body, whole, number)[-1]["metrics"][
        "speculative_decoding"
    ]
    marks = marks_of(whole[:number])[1:]
    assert counts["num_accepted_draft_tokens"] >= sum(
        mark["origins"].count("accepted") for mark in marks
    )
    assert counts["num_draft_tokens"] >= sum(mark.get("drafted", 0) for mark in marks) > 0


def test_marks_come_only_where_they_are_asked_for(client: TestClient) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True}
    assert not marks_of(blocks_of(client, COMPLETIONS, body))


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ({"marks": [{"choice": 1}]}, "resume.marks.0.choice is 1"),
        ({"marks": [{"choice": 0, "token_ids": [1]}]}, "1 token_ids, 0 origins"),
        (
            {"marks": [{"choice": 0, "token_ids": [999], "origins": ["plain"], "pieces": [""]}]},
            "999",
        ),
        ({"marks": [{"choice": 0, "token_ids": [-1], "origins": ["plain"], "pieces": [""]}]}, "-1"),
        ({"marks": [{"choice": 0, "more": 1}]}, "more"),
        ({"id": "with\nline"}, "id"),
    ],
)
def test_marks_that_no_stream_of_the_request_has_are_refused(
    client: TestClient, resume: Any, message: str
) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True, "resume": resume}
    assert message in error_of(client.post(COMPLETIONS, json=body), 400)["message"]


def test_only_streams_are_continued(client: TestClient) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "resume": {}}
    assert "stream: true" in error_of(client.post(COMPLETIONS, json=body), 400)["message"]
