"""What real clients send is answered: fields without effect are named in a header and once in the
log, or refused if strict."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from outrider.serve.headers import IGNORED_HEADER, MAX_HEADER, MAX_LOGGED
from tests.unit.serve.client_bodies import BODIES, CALLS, CHAT, COMPLETIONS, TOOL
from tests.unit.serve.fake_engine import TEMPLATE, FakeEngine
from tests.unit.serve.served_app import chat, error_of, events, serving

CALLS_SHOWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments.a }}"
    "{% endfor %}{% endfor %}{{ tools | length if tools }}"
)
THOUGHTS_SHOWN = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"


def engine_with(template: str) -> FakeEngine:
    engine = FakeEngine(context=1000)
    engine.tokenizer.chat_template = template
    return engine


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[0].prompt)


@pytest.mark.parametrize(
    ("path", "body", "ignored"), [one[1:] for one in BODIES], ids=[one[0] for one in BODIES]
)
def test_bodies_that_real_clients_send(
    path: str, body: dict[str, Any], ignored: str | None
) -> None:
    """Answered, whole or streamed as they ask; what has no effect is named, and nothing else."""
    with serving(engine_with(CALLS_SHOWN)) as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert (
            "".join(
                c["choices"][0]["delta"].get("content") or ""
                for c in events(response)
                if c["choices"]
            )
            == "Hello, world"
        )
    assert response.headers.get(IGNORED_HEADER) == ignored


@pytest.mark.parametrize(
    ("path", "body", "ignored"), [one[1:] for one in BODIES], ids=[one[0] for one in BODIES]
)
def test_a_strict_server_refuses_what_has_no_effect(
    path: str, body: dict[str, Any], ignored: str | None
) -> None:
    with serving(engine_with(CALLS_SHOWN), strict=True) as client:
        response = client.post(path, json=body)
    if ignored is None:
        assert response.status_code == 200, response.text
    else:
        name = ignored.split(", ")[0].rpartition(".")[2]
        assert f"'{name}'" in error_of(response, 400)["message"]


def test_a_call_and_its_result_reach_the_template() -> None:
    engine = engine_with(CALLS_SHOWN)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "7"}
    turns = [{"role": "assistant", "content": None, "tool_calls": CALLS}, result]
    with serving(engine) as client:
        assert (
            client.post(CHAT, json=chat("Hi", tools=[TOOL]) | {"messages": turns}).status_code
            == 200
        )
    assert prompt_of(engine) == "<assistant><tool_call>1<tool>71"


def test_what_is_ignored_reaches_neither_template_nor_engine() -> None:
    """An ignored field of a message or tool that a template could print would not be ignored."""
    engine = engine_with(
        "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}<tool_call>"
    )
    messages = [
        {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}, "tool_calls": []}
    ]
    tool = {**TOOL, "cache_control": 1, "function": {**TOOL["function"], "cache_control": 2}}
    with serving(engine) as client:
        response = client.post(CHAT, json={"messages": messages, "tools": [tool]})
    assert (
        response.headers[IGNORED_HEADER]
        == "messages[].cache_control, tools[].cache_control, tools[].function.cache_control"
    )
    assert "cache_control" not in prompt_of(engine)
    assert "tool_calls" not in prompt_of(engine)
    assert '"default": null' in prompt_of(engine), "null inside a schema is a value"


class TestNull:
    """Everywhere the same as leaving the field out, also for a strict server."""

    @pytest.mark.parametrize("strict", [False, True])
    def test_in_every_object_of_a_chat(self, strict: bool) -> None:
        part = {
            "type": "text",
            "text": "Hi",
            "refusal": None,
            "image_url": None,
            "input_audio": None,
            "x": None,
        }
        call = {
            **CALLS[0],
            "index": None,
            "x": None,
            "function": {**CALLS[0]["function"], "x": None},
        }
        body = {
            "messages": [
                {
                    "role": "user",
                    "content": [part],
                    "name": None,
                    "images": None,
                    "tool_calls": None,
                    "x": None,
                },
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [call],
                    "function_call": None,
                    "reasoning": None,
                },
                {"role": "tool", "content": "7", "tool_call_id": "call_1", "name": None},
            ],
            "tools": [
                {**TOOL, "x": None, "function": {**TOOL["function"], "strict": None, "x": None}}
            ],
            "tool_choice": None,
            "functions": None,
            "modalities": None,
            "web_search_options": None,
            "x": None,
            "response_format": {"type": "text", "json_schema": None, "x": None},
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": None, "x": None},
            "logit_bias": {"5": None, "6": 1},
            "metadata": {"a": None},
            "chat_template_kwargs": {"thinking": None},
            "speculation": {"mode": None, "drafter": None, "draft": None},
            "prediction": None,
            "use_beam_search": None,
        }
        engine = engine_with(CALLS_SHOWN)
        with serving(engine, strict=strict) as client:
            response = client.post(CHAT, json=body)
        assert events(response)
        assert IGNORED_HEADER not in response.headers
        assert engine.seen[0].params.logit_bias == {6: 1}

    def test_in_schemas_and_forms(self) -> None:
        schema = {
            "name": "a",
            "schema": {"enum": [None]},
            "description": None,
            "strict": None,
            "x": None,
        }
        form = {"type": "json_schema", "json_schema": schema}
        with serving(FakeEngine(reply="null")) as client:
            assert client.post(CHAT, json=chat(response_format=form)).status_code == 200
            assert (
                client.post(
                    CHAT, json=chat(structured_outputs={"choice": ["a"], "regex": None})
                ).status_code
                == 200
            )

    @pytest.mark.parametrize("strict", [False, True])
    def test_in_the_other_endpoints(self, strict: bool) -> None:
        with serving(FakeEngine(), strict=strict) as client:
            fields = dict.fromkeys(
                (
                    "suffix",
                    "best_of",
                    "logprobs",
                    "messages",
                    "tools",
                    "prompt_token_ids",
                    "max_tokens",
                    "x",
                )
            )
            for path, body in (
                (COMPLETIONS, {"prompt": "a", **fields}),
                (
                    "/tokenize",
                    {
                        "prompt": "a",
                        "messages": None,
                        "chat_template": None,
                        "model": None,
                        "x": None,
                    },
                ),
                (
                    "/tokenize",
                    {
                        "messages": [{"role": "user", "content": "a", "x": None}],
                        "prompt": None,
                        "tools": None,
                    },
                ),
                ("/detokenize", {"tokens": [97], "model": None, "x": None}),
            ):
                response = client.post(path, json=body)
                assert response.status_code == 200, response.text
                assert IGNORED_HEADER not in response.headers


class TestNaming:
    def test_once_in_the_log_and_in_every_header(self, caplog: Any) -> None:
        caplog.set_level(logging.INFO, "outrider.serve")
        with serving(FakeEngine()) as client:
            for number in range(3):
                response = client.post(CHAT, json=chat(temprature=number, store=True, trace_id="t"))
                assert response.headers[IGNORED_HEADER] == "temprature, store, trace_id"
        lines = {
            record.getMessage(): record.levelname
            for record in caplog.records
            if "ignored" in record.getMessage()
        }
        assert lines == {
            "ignored the unknown field 'temprature'. Did you mean 'temperature'?": "WARNING",
            "ignored the unknown field 'store'. Did you mean 'stream'?": "WARNING",
            "ignored the unknown field 'trace_id'": "INFO",
        }
        assert len([record for record in caplog.records if "ignored" in record.getMessage()]) == 3

    @pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
    def test_by_endpoints_that_generate_nothing(self, path: str) -> None:
        body = {"prompt": "a", "x": 1} if path == "/tokenize" else {"tokens": [97], "x": 1}
        with serving(FakeEngine()) as client:
            assert client.post(path, json=body).headers[IGNORED_HEADER] == "x"

    def test_also_where_the_request_is_refused_later(self) -> None:
        with serving(FakeEngine()) as client:
            response = client.post(CHAT, json=chat("x" * 500, x=1))
        assert error_of(response, 400)["code"] == "context_length_exceeded"
        assert response.headers[IGNORED_HEADER] == "x"

    @pytest.mark.parametrize("stream", [False, True])
    def test_of_evil_names_only_harmless_letters(self, stream: bool, caplog: Any) -> None:
        """A name may hold the end of a header or of a line, anything that is no letter, or half a
        character."""
        caplog.set_level(logging.INFO, "outrider.serve")
        evil = {"a\r\nSet-Cookie: b=c": 1, "d\x00\x1b[2J": 1, "\u00fc\u4e16": 1, "": 1, "e, f": 1}
        with serving(FakeEngine()) as client:
            response = client.post(CHAT, json=chat(stream=stream, **evil))
        assert response.status_code == 200, response.text
        assert "set-cookie" not in response.headers
        assert response.headers[IGNORED_HEADER] == "a??Set-Cookie??b?c, d??[2J, ??, ?, e??f"
        assert all(record.getMessage().isprintable() for record in caplog.records)

    def test_half_a_character_in_a_name(self) -> None:
        with serving(FakeEngine()) as client:
            response = client.post(
                CHAT,
                content=b'{"messages": [{"role": "user", "content": "Hi"}], "\\ud83d": 1}',
                headers={"Content-Type": "application/json"},
            )
        assert response.status_code in (200, 400), response.text

    def test_within_bounds(self, caplog: Any) -> None:
        """Names are the client's: neither header nor log nor time may grow with them."""
        caplog.set_level(logging.INFO, "outrider.serve")
        fields = {f"field_{number}" * 30: 1 for number in range(20_000)}
        with serving(FakeEngine()) as client:
            response = client.post(CHAT, json=chat(**fields))
        header = response.headers[IGNORED_HEADER]
        assert len(header) < MAX_HEADER + 30
        assert header.endswith(" more")
        assert (
            len([record for record in caplog.records if "ignored" in record.getMessage()])
            <= MAX_LOGGED + 1
        )

    def test_can_be_read_by_web_pages(self) -> None:
        origin = {"Origin": "https://app.example"}
        with serving(FakeEngine(), cors_origins=("https://app.example",)) as client:
            response = client.post(CHAT, json=chat(x=1), headers=origin)
        assert (
            response.headers["access-control-expose-headers"] == f"{IGNORED_HEADER}, x-request-id"
        )


REFUSED_WHEN_STRICT: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
    ({"store": True}, "store", "unknown field 'store'"),
    ({"verbosity": "low"}, "verbosity", "unknown field"),
    (
        {"stream": True, "stream_options": {"include_use": True}},
        "stream_options.include_use",
        "include_usage",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "cache_control": {}}]},
        "messages.0.cache_control",
        "unknown field",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
        "messages.0.content.0.y",
        "unknown",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "y"}]},
        "messages.0.reasoning",
        "shows none",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "annotations": [{}]}]},
        "messages.0.annotations",
        "unknown field",
    ),
    ({"tools": [{**TOOL, "x": 1}]}, "tools.0.x", "unknown field"),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"), REFUSED_WHEN_STRICT, ids=lambda value: str(value)[:40]
)
def test_strict_refusals_name_the_field_and_the_nearest(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with serving(FakeEngine(), strict=True) as client:
        error = error_of(client.post(CHAT, json=chat(**fields)), 400)
    assert message in error["message"]
    assert error["param"] == param


class TestThoughts:
    """vLLM's `reasoning` and `reasoning_content` of assistant messages."""

    def rendered(self, template: str, **turn: Any) -> tuple[str, str | None]:
        engine = engine_with(template)
        with serving(engine) as client:
            response = client.post(
                CHAT, json={"messages": [{"role": "assistant", "content": "A", **turn}]}
            )
        assert response.status_code == 200, response.text
        return prompt_of(engine), response.headers.get(IGNORED_HEADER)

    def test_gpt_oss_has_a_name_of_its_own(self) -> None:
        """gpt-oss's template refuses content beside thoughts where tools are called, because both
        stand in one channel there."""
        template = (
            "{% for message in messages %}{{ message.thinking }}|{{ message.content }}{% endfor %}"
        )
        assert self.rendered(template, reasoning="hm") == ("hm|A", None)
        assert self.rendered(template, reasoning="hm", tool_calls=CALLS)[0] == "hm\nA|"

    @pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
    def test_reach_a_template_that_shows_them_under_either_name(self, name: str) -> None:
        assert self.rendered(THOUGHTS_SHOWN, **{name: "hm"}) == ("[hm|A]", None)
        assert self.rendered(
            "{% for m in messages %}{{ m['reasoning'] }}{% endfor %}", **{name: "hm"}
        ) == ("hm", None)

    def test_are_ignored_and_named_where_it_shows_none(self) -> None:
        prompt, named = self.rendered(TEMPLATE + "{# no reasoning here #}", reasoning_content="hm")
        assert "hm" not in prompt
        assert named == "messages[].reasoning_content"
        assert self.rendered(TEMPLATE, reasoning_content="")[1] is None

    def test_may_be_all_there_is(self) -> None:
        assert self.rendered(THOUGHTS_SHOWN, content=None, reasoning="hm") == ("[hm|]", None)

    def test_that_are_no_text_are_ignored(self) -> None:
        assert self.rendered(THOUGHTS_SHOWN, reasoning={"content": "hm"}) == (
            "[|A]",
            "messages[].reasoning",
        )
        assert self.rendered(THOUGHTS_SHOWN, reasoning=[], reasoning_content="hm") == (
            "[hm|A]",
            None,
        )

    def test_of_users_are_ignored(self) -> None:
        engine = engine_with(THOUGHTS_SHOWN)
        with serving(engine) as client:
            response = client.post(
                CHAT, json={"messages": [{"role": "user", "content": "A", "reasoning": "hm"}]}
            )
        assert response.headers[IGNORED_HEADER] == "messages[].reasoning"
        assert prompt_of(engine) == "[|A]"

    def test_count_in_tokenize_too(self) -> None:
        engine = engine_with(THOUGHTS_SHOWN)
        with serving(engine) as client:
            turn = {"role": "assistant", "content": "A", "reasoning": "hm"}
            answer = client.post("/tokenize", json={"messages": [turn]}).json()
        assert engine.tokenizer.decode(answer["tokens"]) == "[hm|A]"


@pytest.mark.parametrize("arguments", [None, "", " "])
def test_a_call_without_arguments_has_none(arguments: str | None) -> None:
    engine = engine_with(
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    )
    call = {"id": "c", "function": {"name": "look", "arguments": arguments}}
    with serving(engine) as client:
        assert (
            client.post(
                CHAT, json={"messages": [{"role": "assistant", "tool_calls": [call]}]}
            ).status_code
            == 200
        )
    assert prompt_of(engine) == "{}"


def test_an_answer_and_the_log_have_the_requests_id(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a support case that nobody can find in the log, and a client's id that ends a header
    or meets another's."""
    caplog.set_level(logging.INFO, "outrider.serve")
    with serving(FakeEngine()) as client:
        answer = client.post(CHAT, json=chat())
        assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        refused = client.post(CHAT, json=chat(temperature=-1))
        lines = [record for record in caplog.records if record.message == "refused"]
        assert [line.request_id for line in lines] == [refused.headers["x-request-id"]]
        own = [client.post(CHAT, json=chat(), headers={"X-Request-Id": "mine/1"}) for _ in range(2)]
        assert {one.headers["x-request-id"] for one in own} == {"mine/1"}
        assert len({one.json()["id"] for one in own}) == 2
        named = [
            record
            for record in caplog.records
            if getattr(record, "client_request_id", None) == "mine/1"
        ]
        assert [record.request_id for record in named] == [one.json()["id"] for one in own]
        assert (
            len(
                client.get("/health", headers={"X-Request-Id": "no id: " + "x" * 200}).headers[
                    "x-request-id"
                ]
            )
            == 32
        )
