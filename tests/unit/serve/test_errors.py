"""Everything that can be refused is refused by name, in OpenAI's shape, with the status that fits;
nothing kills the server."""

from __future__ import annotations

import copy
import http.client
import json
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from outrider.errors import OutriderError
from outrider.serve.api.chat import ChatChoiceWriter
from outrider.serve.headers import IGNORED_HEADER
from outrider.serve.schema.anthropic import MessagesBody
from outrider.serve.schema.base import Body
from outrider.serve.schema.chat import ChatBody
from outrider.serve.schema.completion import CompletionBody
from outrider.serve.schema.responses import ResponsesBody
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, error_of, listening, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

REFUSED_IN_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": True}, "temperature", "must be a number"),
    ({"temperature": "0"}, "temperature", "must be a number"),
    ({"top_p": -0.1}, "top_p", "at least 0"),
    ({"max_tokens": "16"}, "max_tokens", "must be a whole number"),
    ({"max_tokens": 16.5}, "max_tokens", "must be a whole number"),
    ({"max_tokens": True}, "max_tokens", "must be a whole number"),
    ({"seed": False}, "seed", "must be a whole number"),
    ({"seed": 2**64}, "seed", "below"),
    ({"seed": 1e20}, "seed", "must be a whole number"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": True}, "n", "must be a whole number"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "at most 100"),
    ({"stop": [""]}, "stop.0", "must not be empty"),
    ({"stop": ["x"] * 2000}, "stop", "at most 1024 items"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "at most 20"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "has no separate thoughts"),
    ({"separate_reasoning": False, "include_reasoning": False}, "separate_reasoning", "contradict"),
    ({"prediction": {}}, "prediction", "is required"),
    ({"prediction": {"type": "content", "content": 3}}, "prediction", "must be a text"),
    ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "'content'"),
    ({"prediction": {"type": "content", "contents": "x"}}, "prediction.contents", "Did you mean 'content'?"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url", "text": "x"}]}}, "prediction", "'text'"),
    ({"prediction": {"type": "content", "content": "x" * 300}}, "prediction", "context holds 200 tokens, the prediction has 300"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "knows no"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "knows no"),
    ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "knows no"),
    ({"chat_template_kwargs": {"shou": True}}, "chat_template_kwargs", "knows no 'shou'"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs", "cannot set"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "cannot set"),
    ({"min_tokens": 30, "max_tokens": 20}, "min_tokens", "at most max_tokens (20)"),
    ({"bad_words": [""]}, "bad_words.0", "must not be empty"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage", "include_usage"),
    ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "calls could not be read back"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "older name"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": None}, "messages", "either"),
    ({"add_special_tokens": True}, "add_special_tokens", "can only be false"),
    ({"messages": None, "prompt_token_ids": [1], "chat_template_kwargs": {}}, "chat_template_kwargs", "needs 'messages'"),
    ({"messages": None, "prompt_token_ids": [1], "reasoning_effort": "low"}, "reasoning_effort", "needs 'messages'"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "needs 'content'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0", "'image_url' is not supported: this server reads text only",
    ),
    ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0.content", "needs 'content'"),
    ({"messages": [{"rol": "user", "content": "x"}]}, "messages.0.rol", "Did you mean 'role'?"),
    ({"speculation": {"mode": "fixed"}}, "speculation.mode", "needs max_draft_tokens"),
    ({"speculation": {"mode": "on"}}, "speculation.mode", "'auto'"),
    ({"speculation": {"draft": 3}}, "speculation.draft", "Did you mean 'drafter'?"),
    ({"metadata": dict.fromkeys(map(str, range(17)), "x")}, "metadata", "at most 16 pairs, not 17"),
    ({"metadata": {"x" * 65: "a"}}, "metadata", "names of at most 64 characters, not 65"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "values of at most 512 characters, not 513 ('a')"),
    ({"safety_identifier": "x" * 65}, "safety_identifier", "at most 64 characters"),
    ({"prompt_cache_key": "x" * 65}, "prompt_cache_key", "at most 64 characters"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "message"), REFUSED_IN_CHAT, ids=lambda value: str(value)[:40]
)
def test_chat_refuses_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    with serving(FakeEngine()) as client:
        error = error_of(client.post(CHAT, json=chat(**fields)), 400)
    assert message in error["message"], error
    assert str(error["param"]).startswith(param), error
    assert error["type"] == "invalid_request_error"


FORM = {"name": "f", "input_schema": {}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
INSIDE: list[tuple[dict[str, Any], str]] = [
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "'tool_choice.type' must be 'function', got 'allowed_tools'",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "'tool_choice.function' is required"),
    (
        {"tools": [TOOL], "tool_choice": "f"},
        "'tool_choice' must be 'none', 'auto' or 'required' or an object, got 'f'",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "'tools.0.type' must be 'function', got 'custom'"),
    ({"tools": "f"}, "'tools' must be a list, got 'f'"),
    ({"tools": ["f"]}, "'tools.0' must be an object, got 'f'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "'messages.0.content.0.text' must be a text, got 5",
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "'messages.0.content' must be a text or a list, got 5",
    ),
    ({"stop": 5}, "'stop' must be a text or a list, got 5"),
    ({"stop": ["a", 5]}, "'stop.1' must be a text, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), INSIDE, ids=lambda value: str(value)[:40])
def test_what_is_wrong_inside_a_value_is_named(fields: dict[str, Any], message: str) -> None:
    """The value's own kind decides which of its forms is meant: the others say nothing about it."""
    with serving(FakeEngine()) as client:
        error = error_of(client.post(CHAT, json=chat(**fields)), 400)
    assert error["message"] == message
    assert error["param"] == message.split("'")[1]


def test_a_list_that_is_too_short_is_named_in_plain_words() -> None:
    with serving(FakeEngine()) as client:
        body = {"model": "fake", "max_tokens": 3, "messages": []}
        assert (
            client.post("/v1/messages", json=body).json()["error"]["message"]
            == "'messages' must have at least 1, got []"
        )


REFUSED_IN_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "either"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "1 to"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": {"a": 1}}, "prompt", "must be a text or a list"),
    ({"prompt": [1, "a"]}, "prompt", "must be"),
    ({"prompt": [999]}, "prompt", "outside the vocabulary of 257"),
    ({"prompt": [10**30]}, "prompt", "outside the vocabulary"),
    ({"prompt": "x" * 300}, "prompt", "maximum context length is 200 tokens"),
    ({"best_of": 1, "n": 2}, "best_of", "at least n = 2"),
    ({"best_of": 2, "stream": True}, "best_of", "streamed"),
    ({"max_tokens": 0}, "max_tokens", "echo only"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logprobs": True}, "logprobs", "must be a whole number"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, None, "give one"),
    ({"seed": 2**64}, "seed", "below"),
    ({"guided_json": "[" * 100_000}, None, "guided_json is no JSON"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "message"), REFUSED_IN_COMPLETIONS, ids=lambda value: str(value)[:40]
)
def test_completions_refuse_by_name(
    fields: dict[str, Any], param: str | None, message: str
) -> None:
    with serving(FakeEngine()) as client:
        error = error_of(client.post(COMPLETIONS, json={"prompt": "a", **fields}), 400)
    assert message in error["message"], error
    if param is not None:
        assert error["param"] == param, error


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [1.5] * 1000}),
        (ChatBody, {"messages": [{}] * 1000}),
        (ChatBody, {**chat(), "logit_bias": dict.fromkeys(map(str, range(1000)), "x")}),
        (ResponsesBody, {"input": [{"role": "user", "content": [{}] * 1000}]}),
        (MessagesBody, {"max_tokens": 1, "messages": [{}] * 1000}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_thousand_mistakes_are_not_all_collected(
    kind: type[Body], fields: dict[str, Any]
) -> None:
    """A body has room for millions, which took gigabytes and minutes in which nobody else was
    answered."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() < 10


OTHERS: list[dict[str, Any]] = [
    {"use_beam_search": True},
    {"typical_p": 0.9},
    {"max_new_tokens": 5},
    {"functions": [{"name": "a"}]},
    {"format": "json"},
    {"store": False},
]


@pytest.mark.parametrize("fields", OTHERS, ids=str)
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, {"prompt": "a"})])
def test_fields_of_other_servers_are_named_or_refused(
    path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Whatever they would do there, and whatever their value: no table knows them."""
    [name] = fields
    with serving(FakeEngine()) as client:
        answer = client.post(path, json={**body, **fields})
    assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, name)
    with serving(FakeEngine(), strict=True) as client:
        error = error_of(client.post(path, json={**body, **fields}), 400)
    assert error["param"] == name
    assert error["message"].startswith(f"unknown field '{name}'.")


def test_arguments_that_no_parser_takes_are_left_to_the_template() -> None:
    """A client hands back what a model wrote, and models write anything."""
    engine = FakeEngine(context=200_000)
    engine.tokenizer.chat_template += (
        "{% for m in messages %}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    )
    with serving(engine) as client:
        for arguments in ("[" * 100_000, "{", "", '{"a": "\\ud83d"}'):
            call = {
                "id": "c",
                "type": "function",
                "function": {"name": "f", "arguments": arguments},
            }
            messages = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [call]},
            ]
            response = client.post(CHAT, json={"messages": messages})
            assert response.status_code == 200, response.text


def test_half_a_character_is_no_text() -> None:
    """JSON can escape one half of a surrogate pair, which no tokenizer takes."""
    content = b'{"prompt": "\\ud800"}'
    with serving(FakeEngine()) as client:
        error = error_of(
            client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}),
            400,
        )
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", 1),
        ("chat_template_kwargs", 1),
        ("structured_outputs", 1),
        ("speculation", 1),
        ("metadata", "x" * 513),
    ],
)
def test_half_a_character_in_a_name_is_refused_by_that_name(name: str, value: Any) -> None:
    """The refusal names what was sent, and must be something that can be sent back."""
    content = json.dumps(chat(**{name: {"\ud800": value}})).encode()
    with serving(FakeEngine()) as client:
        error = error_of(
            client.post(CHAT, content=content, headers={"Content-Type": "application/json"}), 400
        )
    assert "\ud800" in error["message"].replace("\\ud800", "\ud800")


PART = {"role": "user", "content": [{"type": "text", "text": "x"}]}
FORM = {"name": "f", "input_schema": {}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("path", "body", "inside"),
    [
        (CHAT, {"messages": [PART]}, ()),
        (CHAT, {"messages": [PART]}, ("messages", 0)),
        (CHAT, {"messages": [PART]}, ("messages", 0, "content", 0)),
        (CHAT, chat(stream_options={}), ("stream_options",)),
        (CHAT, chat(tools=[TOOL]), ("tools", 0)),
        (CHAT, chat(tools=[TOOL]), ("tools", 0, "function", "parameters", "properties")),
        (COMPLETIONS, {"prompt": "x"}, ()),
        ("/detokenize", {"tokens": [1]}, ()),
        ("/tokenize", {"prompt": "x"}, ()),
        ("/v1/responses", {"input": [PART | {"content": "x"}]}, ("input", 0)),
        ("/v1/messages", {"max_tokens": 1, "messages": [PART]}, ("messages", 0, "content", 0)),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [PART], "tools": [FORM]},
            ("tools", 0, "input_schema"),
        ),
    ],
    ids=str,
)
def test_half_a_character_in_the_name_of_a_field_is_named(
    path: str, body: dict[str, Any], inside: tuple[str | int, ...]
) -> None:
    """Catches errors that say an object is no text, or that the body is no JSON, because one of its
    names cannot be written."""
    changed = copy.deepcopy(body)
    place: Any = changed
    for key in inside:
        place = place[key]
    place["a\ud800"] = {}
    with serving(FakeEngine()) as client:
        response = client.post(
            path, content=json.dumps(changed), headers={"Content-Type": "application/json"}
        )
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "'a\\ud800'" in message
    assert "half a surrogate pair" in message


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    fields = (
        "temperature",
        "tools",
        "tool_choice",
        "functions",
        "stop",
        "seed",
        "speculation",
        "audio",
        "prediction",
        "store",
    )
    with serving(FakeEngine()) as client:
        response = client.post(CHAT, json=chat(**dict.fromkeys(fields)))
    assert response.status_code == 200


def test_harmless_values_of_other_servers_are_taken() -> None:
    fields = {
        "store": False,
        "modalities": ["text"],
        "service_tier": "auto",
        "verbosity": "medium",
        "skip_special_tokens": True,
        "user": "me",
        "metadata": {"a": "b"},
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "response_format": {"type": "text"},
    }
    with serving(FakeEngine()) as client:
        assert client.post(CHAT, json=chat(**fields)).status_code == 200


def test_labels_are_cut_short_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A client must not fill the log; what OpenAI takes is taken, and so is what others send as
    metadata."""
    caplog.set_level("INFO", "outrider.serve")
    metadata = {"x" * 64: "y" * 512, "deep": {"a": ["z" * 9000]}, "number": 3, "none": None}
    with serving(FakeEngine()) as client:
        assert (
            client.post(
                CHAT, json=chat(user="u" * 9000, metadata=metadata, safety_identifier="s" * 64)
            ).status_code
            == 200
        )
    [line] = [vars(record) for record in caplog.records if record.message == "labels"]
    assert line["user"] == "u" * 511 + "…"
    assert (line["metadata"]["x" * 64], line["metadata"]["number"], line["safety_identifier"]) == (
        "y" * 512,
        3,
        "s" * 64,
    )
    assert len(line["metadata"]["deep"]) == 512
    assert line["metadata"]["deep"].startswith('{"a": ["zzz')


def test_too_long_a_prompt_is_known_by_code_and_by_words() -> None:
    """Agents shorten a conversation when they read OpenAI's code, or OpenAI's or Anthropic's words."""
    with serving(FakeEngine()) as client:
        error = error_of(client.post(COMPLETIONS, json={"prompt": "x" * 300}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("prompt is too long: 300 tokens > 199 maximum")
    assert "This model's maximum context length is 200 tokens" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[1]",
        b'"x"',
        b"\xff",
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b"[" * 100_000,
    ],
)
def test_bodies_that_are_no_request(content: bytes) -> None:
    with serving(FakeEngine()) as client:
        error_of(
            client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}),
            400,
        )


@pytest.mark.parametrize("field", ["prompt", "stop", "logit_bias", "guided_json", "nonsense"])
@pytest.mark.parametrize(("opens", "closes"), ["[]", ('{"a":', "}")])
def test_values_that_are_nested_deeply(field: str, opens: str, closes: str) -> None:
    """Deeper than Python recurses from where bodies are checked, and not as deep as makes the JSON
    reader give up."""
    content = f'{{"prompt": "a", "{field}": {opens * 900}1{closes * 900}}}'
    with serving(FakeEngine()) as client:
        response = client.post(
            COMPLETIONS, content=content, headers={"Content-Type": "application/json"}
        )
    assert response.status_code == (200 if field == "nonsense" else 400), response.text
    assert response.status_code == 200 or len(response.text) < 600, "the path to it is cut off"


def test_where_json_breaks_off() -> None:
    with serving(FakeEngine()) as client:
        response = client.post(
            COMPLETIONS, content=b'{"prompt', headers={"Content-Type": "application/json"}
        )
    message = "the body is not JSON: Unterminated string starting at character 1"
    assert error_of(response, 400)["message"] == message


def test_body_that_is_not_declared_as_json() -> None:
    with serving(FakeEngine()) as client:
        error = error_of(
            client.post(
                COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}
            ),
            400,
        )
    assert "application/json" in error["message"]


def test_no_such_path_and_no_such_method() -> None:
    with serving(FakeEngine()) as client:
        assert "/v1/embeddings" in error_of(client.post("/v1/embeddings", json={}), 404)["message"]
        assert "GET" in error_of(client.get(CHAT), 405)["message"]
        assert client.head(CHAT).status_code == 405


def test_head_is_a_get_without_its_body() -> None:
    """Probes and `curl -I` send it."""
    with listening(FakeEngine()) as address:
        for path in ("/health", "/ready", "/v1/models", "/metrics", "/"):
            answer = httpx2.head(f"{address}{path}")
            assert (answer.status_code, answer.content) == (200, b""), path
            assert int(answer.headers["content-length"]) > 0


def test_unknown_model_names_the_nearest() -> None:
    with serving(FakeEngine(name="llama-8b"), FakeEngine(name="qwen")) as client:
        error = error_of(client.post(CHAT, json=chat(model="lama-8b")), 404)
        missing = error_of(client.post(CHAT, json=chat(model=None)), 400)
    assert "Did you mean 'llama-8b'?" in error["message"]
    assert error["code"] == "model_not_found"
    assert missing["param"] == "model"


def test_a_queue_that_fills_meanwhile_is_a_429_with_retry_after() -> None:
    """There was room when it was asked for, and somebody else came first."""
    with serving(FakeEngine(max_queue=2)) as client:
        client.state.models["fake"].engine.check_room = lambda count: None
        response = client.post(CHAT, json=chat(n=3))
        streamed = client.post(CHAT, json=chat(n=3, stream=True))
        engine = client.state.models["fake"].engine
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "3"
        assert streamed.status_code == 429
        assert len(engine.cancelled) > 0, (
            "answers that were accepted before the refusal must not go on"
        )


def test_a_bug_is_a_500_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """The line with its traceback has the id that the client was given."""

    def broken(request: Any) -> str:
        raise AssertionError

    with serving(FakeEngine()) as client:
        served = client.state.models["fake"]
        served.engine.submit = broken
        for stream in (False, True):
            answer = client.post(CHAT, json=chat(stream=stream))
            error = error_of(answer, 500)
            assert error["type"] == "server_error"
            assert "Assertion" not in error["message"]
            assert caplog.records[-1].request_id == answer.headers["x-request-id"]
        assert client.get("/health").status_code == 200


def test_what_goes_wrong_in_an_answer_is_logged_with_its_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody can tell which of the lines of a busy server belongs to the client that
    complains."""
    with serving(FakeEngine(reply=OutriderError("it failed"))) as client:
        answer = client.post(CHAT, json=chat())
        assert error_of(answer, 500)["message"] == "it failed"
        assert [record.request_id for record in caplog.records] == [answer.headers["x-request-id"]]
        caplog.clear()
        client.state.models["fake"].engine.reply = "Hello"
        monkeypatch.setattr(ChatChoiceWriter, "deltas", None)
        answer = client.post(CHAT, json=chat(stream=True))
        assert "its log says more" in answer.text
        [line] = [record for record in caplog.records if record.getMessage() == "a stream failed"]
        assert line.request_id == answer.headers["x-request-id"]


class TestGate:
    def test_keys(self) -> None:
        with serving(FakeEngine(), api_keys=("secret", "other")) as client:
            for header in (
                None,
                "Bearer wrong",
                "Basic secret",
                "Bearer",
                "Bearer secr\u00e9t".encode(),
            ):
                headers = {} if header is None else {"Authorization": header}
                response = client.post(CHAT, json=chat(), headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
            for key in ("secret", "other"):
                assert (
                    client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
                    == 200
                )
            assert client.get("/v1/models").status_code == 401
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 401
            for path in ("/health", "/ready", "/metrics", "/version", "/", "/openapi.json"):
                assert client.get(path).status_code == 200, path

    @pytest.mark.parametrize(
        "key",
        [
            "secretly",
            "secret secret",
            "secre",
            "ecret",
            "SECRET",
            "secret\x00",
            "other2",
            "secretother",
        ],
    )
    def test_only_whole_keys_are_keys(self, key: str) -> None:
        """Catches a comparison of beginnings or of ends, in both ways in which keys are sent. Space
        around them is none of it."""
        with serving(FakeEngine(), api_keys=("secret", "other")) as client:
            for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert (
                    error_of(client.get("/v1/models", headers=headers), 401)["message"]
                    == "the API key is wrong"
                )
            for headers in ({"Authorization": "bearer  secret "}, {"x-api-key": "other"}):
                assert client.get("/v1/models", headers=headers).status_code == 200

    def test_a_key_that_another_one_begins_with(self) -> None:
        """Both are keys; what lies between them is none."""
        with serving(FakeEngine(), api_keys=("key", "key-of-two")) as client:
            keys = ("key", "key-of", "key-of-two")
            statuses = [
                client.get("/v1/models", headers={"x-api-key": key}).status_code for key in keys
            ]
        assert statuses == [200, 401, 200]

    def test_body_limit(self) -> None:
        with serving(FakeEngine(), max_body_bytes=200) as client:
            assert client.post(CHAT, json=chat()).status_code == 200
            room = 200 - len(json.dumps(chat("")))
            for count, status in ((room, 200), (room + 1, 413)):
                body = json.dumps(chat("x" * count)).encode()
                for content in (body, iter([body[:50], body[50:]])):
                    assert (
                        client.post(
                            CHAT, content=content, headers={"Content-Type": "application/json"}
                        ).status_code
                        == status
                    )
            assert (
                error_of(client.post(CHAT, json=chat("x" * 300)), 413)["code"] == "body_too_large"
            )
            # chunked: no length beforehand
            parts = (part for part in [b'{"prompt": "' + b"x" * 150, b"x" * 150 + b'"}'])
            response = client.post(
                COMPLETIONS, content=parts, headers={"Content-Type": "application/json"}
            )
            assert error_of(response, 413)["code"] == "body_too_large"

    def test_a_client_that_sends_everything_first_reads_why_it_was_too_much(self) -> None:
        """Catches a connection that is reset in the middle of a large body: the client retries it,
        and never learns why."""
        with listening(FakeEngine(), max_body_bytes=200) as address:
            for content in (b"x" * 30_000_000, iter([b"x" * 10_000_000] * 3)):
                connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
                connection.request("POST", CHAT, content, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                assert (answer.status, b"body_too_large" in answer.read()) == (413, True)
                connection.close()

    def test_cors(self) -> None:
        origin = {"Origin": "https://app.example"}
        with serving(
            FakeEngine(), cors_origins=("https://app.example",), api_keys=("k",)
        ) as client:
            asked = {
                **origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization",
            }
            assert (
                client.options(CHAT, headers=asked).headers["access-control-allow-origin"]
                == "https://app.example"
            )
            refused = client.post(CHAT, json=chat(), headers=origin)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == "https://app.example"
        with serving(FakeEngine()) as client:
            assert (
                "access-control-allow-origin"
                not in client.post(CHAT, json=chat(), headers=origin).headers
            )
