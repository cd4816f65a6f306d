"""/v1/responses as the openai package reads it: whole and streamed, thoughts, calls, and
conversations that go on."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.serve.api.response_store import ResponseStore, held_bytes
from outrider.serve.errors import ApiError
from outrider.serve.headers import IGNORED_HEADER
from tests.unit.serve.fake_engine import FakeEngine, engine
from tests.unit.serve.served_app import error_of, listening, serving
from tests.unit.serve.written_tools import TEMPLATES, TOOLS, written

openai = pytest.importorskip("openai")
URL = "/v1/responses"
FUNCTIONS = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
SHOWN = "{# </think> #}{% for m in messages %}{% if m.reasoning %}({{ m.reasoning }}){% endif %}{% endfor %}"


@pytest.fixture
def thinker() -> FakeEngine:
    """A model that thinks, answers, and calls a tool where there are some."""
    call = written("hermes", [("weather", {"city": "Ulm"})])

    def reply(request: Any) -> str:
        shown = made.tokenizer.decode(request.prompt)
        return (
            f"<think>\nhm\n</think>\n\nLet me look.{call}"
            if "tools]" in shown
            else "<think>hm</think>yes"
        )

    made = engine("", f"{{# {TEMPLATES['hermes']} #}}{SHOWN}")
    made.reply = reply
    return made


@pytest.fixture
def client(thinker: FakeEngine) -> Iterator[Any]:
    with listening(thinker) as address:
        yield openai.OpenAI(
            base_url=f"{address}/v1",
            api_key="none",
            max_retries=0,
            _strict_response_validation=True,
        )


def prompts(thinker: FakeEngine) -> list[str]:
    return [thinker.tokenizer.decode(request.prompt) for request in thinker.seen]


def test_a_text_and_a_stream_of_it(client: Any, thinker: FakeEngine) -> None:
    """The package puts a stream together to the same response; every event is one that it knows."""
    ask: dict[str, Any] = {
        "model": "fake",
        "input": "Hi",
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "temperature": 0,
    }
    whole = client.responses.create(**ask, top_p=0.5)
    thought, message = whole.output
    assert (thought.type, thought.content[0].text, thought.status) == (
        "reasoning",
        "hm",
        "completed",
    )
    assert (whole.output_text, message.role, whole.status, whole.model) == (
        "yes",
        "assistant",
        "completed",
        "fake",
    )
    assert (whole.instructions, whole.metadata, whole.temperature, whole.top_p) == (
        "Be kind.",
        {"a": "b"},
        0,
        0.5,
    )
    assert whole.usage.output_tokens_details.reasoning_tokens == 2 + len("</think>")
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert prompts(thinker)[0].startswith("<system>Be kind.<user>Hi")
    with client.responses.stream(**ask) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    kinds = list(dict.fromkeys(event.type for event in seen))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.completed",
    ]
    assert (final.output_text, final.output[0].content[0].text) == ("yes", "hm")
    assert final.usage == whole.usage


def test_every_event_has_its_number(thinker: FakeEngine) -> None:
    with serving(thinker) as client:
        blocks = client.post(URL, json={"input": "Hi", "stream": True}).text.split("\n\n")
    assert blocks.pop() == ""
    events = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    found = [json.loads(event["data"]) for event in events]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["event"] for event in events] == [one["type"] for one in found]
    assert found[-1]["type"] == "response.completed", "and no [DONE]"


def test_a_call_its_result_and_the_end(client: Any, thinker: FakeEngine) -> None:
    """A loop as agents run it, in both ways: items sent back, and `previous_response_id`."""
    first = client.responses.create(input="Weather?", tools=FUNCTIONS)
    call = first.output[-1]
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(input=[result], previous_response_id=first.id)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    again = client.responses.create(input=[{"role": "user", "content": "Weather?"}, *items, result])
    assert second.output_text == again.output_text == "yes"
    one, two = prompts(thinker)[1:]
    assert one == two
    assert one.startswith("<user>Weather?<assistant>Let me look.<tool>rain")
    assert one.endswith("(hm)")
    third = client.responses.create(input="Thanks", previous_response_id=second.id)
    assert prompts(thinker)[-1].startswith(
        "<user>Weather?<assistant>Let me look.<tool>rain<assistant>yes<user>Thanks"
    )
    assert third.previous_response_id == second.id
    with client.responses.stream(model="fake", input="Weather?", tools=FUNCTIONS) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response().output[-1]
    assert {
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    } <= kinds
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)


def test_what_is_kept(client: Any, thinker: FakeEngine) -> None:
    """Streams, too; nothing where the client does not want it; the oldest make room."""
    events = list(client.responses.create(input="Hi", stream=True))
    assert (
        client.responses.create(input="So?", previous_response_id=events[-1].response.id).status
        == "completed"
    )
    unkept = client.responses.create(input="Hi", store=False)
    assert unkept.model_extra["store"] is False
    with pytest.raises(openai.BadRequestError, match="max_stored_responses") as caught:
        client.responses.create(input="So?", previous_response_id=unkept.id)
    assert caught.value.code == "previous_response_not_found"
    store = ResponseStore(2, max_bytes=2500)
    for name in "abc":
        store.keep(
            name, [{"id": name}], [], {"output": []}, store.find("a") if name == "b" else None
        )
    with pytest.raises(ApiError, match="no response 'a'"):
        store.find("a")
    assert [item["id"] for item in store.find("b").conversation()] == ["a", "b"], (
        "what it went on from is still there"
    )
    store.keep("d", [{"id": "x" * 3000}], [], {"output": []}, None)
    for name in "bcd":
        with pytest.raises(ApiError):
            store.find(name)
    one = ResponseStore(1, max_bytes=2500)
    for before, name in zip([None, *"abc"], "abcd", strict=True):
        one.keep(
            name,
            [{"id": "x" * 60}],
            [],
            {"output": []},
            None if before is None else one.find(before),
        )
    with pytest.raises(ApiError):
        one.find("d")  # with all that it goes on from, it is too much to keep
    one.keep("e", [{"id": "x" * 200}], [], {"output": []}, None)
    assert one.find("e"), "and nothing of that counts any more"
    none = ResponseStore(0)
    none.keep("a", [], [], {"output": []}, None)
    with pytest.raises(ApiError, match="keeps none"):
        none.find("a")


@pytest.mark.parametrize(
    "content", ["a", "é" * 50, "x" * 4000, [{"type": "input_text", "text": "a"}]]
)
def test_what_is_kept_takes_the_memory_that_is_counted(content: Any) -> None:
    """Guards against items of one letter, which took eight times their characters."""
    text = json.dumps({"id": "m", "type": "message", "content": content})
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    items = json.loads(f"[{','.join([text] * 500)}]")
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.7 < held_bytes(items) / taken < 1.7


def test_half_a_character_in_metadata_is_answered_as_it_was_sent(thinker: FakeEngine) -> None:
    """JSON can write it, UTF-8 cannot: it was a 500."""
    body = b'{"input": "Hi", "metadata": {"a": "\\ud83d"}}'
    with serving(thinker) as client:
        answer = client.post(URL, content=body, headers={"Content-Type": "application/json"})
        kept = client.get(f"{URL}/{answer.json()['id']}")
    assert answer.status_code == kept.status_code == 200
    assert answer.json() == kept.json()
    assert "\\ud83d" in answer.text


def test_a_kept_response_is_answered_again_and_forgotten(client: Any, thinker: FakeEngine) -> None:
    """Whole or streamed; one that is forgotten is not gone from those that went on from it."""
    first = client.responses.create(input="Hi", metadata={"a": "b"})
    with client.responses.stream(
        model="fake", input="And?", previous_response_id=first.id
    ) as stream:
        second = stream.get_final_response()
    assert client.responses.retrieve(first.id).model_dump() == first.model_dump()
    again = client.responses.retrieve(second.id)
    assert (again.output_text, again.usage, again.previous_response_id) == (
        second.output_text,
        second.usage,
        first.id,
    )
    client.responses.delete(first.id)
    for gone in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no response 'resp"):
            gone()
    with pytest.raises(openai.BadRequestError, match="to continue from"):
        client.responses.create(input="Hi", previous_response_id=first.id)
    client.responses.create(input="Now?", previous_response_id=second.id)
    assert prompts(thinker)[-1].startswith("<user>Hi")
    unkept = client.responses.create(input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    with pytest.raises(openai.BadRequestError, match="'include' is not supported"):
        client.responses.retrieve(second.id, include=["reasoning.encrypted_content"])


def test_an_item_that_is_kept_may_be_named_instead_of_sent(
    client: Any, thinker: FakeEngine
) -> None:
    """The AI SDK sends earlier answers so; one that is forgotten must be sent whole."""
    first = client.responses.create(input="Hi")
    asked = [
        {"role": "user", "content": "Hi"},
        *[{"type": "item_reference", "id": item.id} for item in first.output],
    ]
    client.responses.create(input=[*asked, {"role": "user", "content": "So?"}])
    client.responses.create(input="So?", previous_response_id=first.id)
    assert prompts(thinker)[-1] == prompts(thinker)[-2]
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="give its content"):
        client.responses.create(input=asked)


def test_cut_off(client: Any) -> None:
    found = client.responses.create(input="Hi", max_output_tokens=9)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.output[0].type, found.output[0].status) == ("reasoning", "incomplete")
    last = list(client.responses.create(input="Hi", max_output_tokens=9, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_a_time_limit_leaves_a_response_incomplete(client: Any, thinker: FakeEngine) -> None:
    thinker.late = True
    found = client.responses.create(input="Hi")
    assert (found.status, found.output[0].status) == ("incomplete", "incomplete")
    last = list(client.responses.create(input="Hi", stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_a_form(thinker: FakeEngine) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    thinker.reply = '{"a": 1}'
    with serving(thinker) as client:
        found = client.post(URL, json={"input": "Hi", "text": {"format": form}}).json()
        assert (
            client.post(
                URL, json={"input": "Hi", "text": {"format": {"type": "json_object"}}}
            ).status_code
            == 200
        )
    assert found["output"][0]["content"][0]["text"] == '{"a": 1}'
    assert found["text"]["format"] == form
    assert all(request.constraint is not None for request in thinker.seen)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "reads text only",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "no item 'msg_1'"),
        ({"input": [{"type": "item_reference"}]}, "input", "needs 'id'"),
        ({"input": [{"type": "computer_call"}]}, "input", "no tools of its own"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input",
            "needs 'call_id'",
        ),
        ({"input": []}, "input", "nothing to answer"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"include": ["file_search_call.results"]}, "include", "not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "knows no 'reasoning.effort'"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "strng"}}}},
            "text.format.schema",
            "text.format.schema",
        ),
        ({"input": [{"type": "custom_tool_call"}]}, "input", "models are shown functions"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "needs 'schema'"),
    ],
)
def test_what_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    with serving(FakeEngine(context=1000)) as client:
        error = error_of(client.post(URL, json={"input": "Hi", **fields}), 400)
    assert message in error["message"]
    assert str(error["param"]).startswith(param)


def test_what_has_no_effect_is_named() -> None:
    """Agents send such fields; a strict server refuses them."""
    body = {
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "summary": [], "encrypted_content": "abc"},
        ],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto", "effort": "medium"},
        "text": {"verbosity": "low"},
        "service_tier": "flex",
        "store": False,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "max_tool_calls": 3,
    }
    with serving(FakeEngine(context=1000)) as client:
        response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    assert set(response.headers[IGNORED_HEADER].split(", ")) == {
        "service_tier",
        "max_tool_calls",
        "input[].encrypted_content",
        "text.verbosity",
        "reasoning.summary",
        "include",
    }
    with serving(FakeEngine(context=1000), strict=True) as client:
        error = error_of(client.post(URL, json=body), 400)
    assert error["message"].startswith("unknown field 'service_tier'.")


def test_other_tools_of_the_client_are_ignored_by_name(client: Any, thinker: FakeEngine) -> None:
    """Codex sends them beside its functions, and runs them itself: no tool of this server's is
    missing."""
    others = [
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "",
            "tools": [{"type": "function", "name": "look"}],
        },
        {"type": "local_shell"},
        {"type": "custom", "name": "other"},
    ]
    whole = client.responses.with_raw_response.create(input="Weather?", tools=[*others, *FUNCTIONS])
    assert whole.headers[IGNORED_HEADER] == "tools[custom], tools[namespace], tools[local_shell]"
    assert [tool.name for tool in whole.parse().tools] == [tool["name"] for tool in FUNCTIONS]
    assert any(item.type == "function_call" for item in whole.parse().output)
    client.responses.create(input="Weather?", tools=FUNCTIONS)
    assert thinker.seen[0].prompt == thinker.seen[1].prompt
    alone = client.responses.with_raw_response.create(
        input="Hi", tools=others[2:3], tool_choice="auto"
    )
    assert (alone.headers[IGNORED_HEADER], alone.parse().tools) == ("tools[local_shell]", [])
    with pytest.raises(openai.BadRequestError, match="'tool_choice' needs 'tools'"):
        client.responses.create(input="Hi", tools=others, tool_choice="required")
    counted = client.responses.input_tokens.with_raw_response.count(
        input="Weather?", tools=[*others, *FUNCTIONS]
    )
    assert counted.parse().input_tokens == len(thinker.seen[0].prompt)
    with serving(FakeEngine(context=1000), strict=True) as strict:
        error = error_of(strict.post(URL, json={"input": "Hi", "tools": others}), 400)
    assert (error["message"], error["param"]) == (
        "'custom' has no effect here: models are shown functions, their calls and outputs",
        "tools.0",
    )


def test_an_engine_that_fails_in_the_stream() -> None:
    fake = FakeEngine(reply=ApiError("it broke", status=500))
    with listening(fake) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        last = list(client.responses.create(input="Hi", stream=True))[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "it broke")


def test_input_tokens_are_those_of_the_response(client: Any) -> None:
    """Earlier turns, instructions and tools included; what only an answer has is ignored by name."""
    first = client.responses.create(input="Weather?", tools=FUNCTIONS)
    ask: dict[str, Any] = {
        "input": "Hi",
        "instructions": "Be kind.",
        "tools": FUNCTIONS,
        "previous_response_id": first.id,
    }
    counted = client.responses.input_tokens.with_raw_response.count(
        **ask, extra_body={"stream": True}
    )
    assert counted.headers[IGNORED_HEADER] == "stream"
    assert counted.parse().object == "response.input_tokens"
    assert counted.parse().input_tokens == client.responses.create(**ask).usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(input="Hi", tool_choice="required")
    assert caught.value.param == "tool_choice"
