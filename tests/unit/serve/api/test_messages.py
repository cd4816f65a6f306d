"""/v1/messages as the anthropic package reads it: whole and streamed, thoughts, tools, counts,
refusals in its own shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.serve.headers import IGNORED_HEADER
from tests.unit.serve.fake_engine import FakeEngine, engine
from tests.unit.serve.served_app import listening, serving
from tests.unit.serve.written_tools import TEMPLATES, TOOLS, written

anthropic = pytest.importorskip("anthropic")
URL = "/v1/messages"
SWITCH = "{# {{ enable_thinking }} </think> #}{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
SHOWN = "{% for m in messages %}{% if m.reasoning %}({{ m.reasoning }}){% endif %}{% endfor %}"
FUNCTIONS = [
    {
        "name": tool["function"]["name"],
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
    }
    for tool in TOOLS
]
USER = [{"role": "user", "content": "Hi"}]
KEY = "sesame"


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

    made = engine(
        "", f"{{# {TEMPLATES['hermes']} #}}{SWITCH}{SHOWN}", ("<think>", "</think>"), special=False
    )
    made.reply = reply
    made.cached = 3
    return made


@pytest.fixture
def client(thinker: FakeEngine) -> Iterator[Any]:
    with listening(thinker, api_keys=(KEY,)) as address:
        yield anthropic.Anthropic(
            base_url=address, api_key=KEY, max_retries=0, _strict_response_validation=True
        )


def prompts(thinker: FakeEngine) -> list[str]:
    return [thinker.tokenizer.decode(request.prompt) for request in thinker.seen]


def test_a_message_and_a_stream_of_it(client: Any, thinker: FakeEngine) -> None:
    ask: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 90,
        "messages": USER,
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}],
        "metadata": {"user_id": "u"},
    }
    whole = client.messages.create(
        **ask, stop_sequences=["###"], extra_body={"temperature": 0, "top_k": 5}
    )
    thought, text = whole.content
    assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", "hm", True)
    assert (text.type, text.text, whole.role, whole.model) == ("text", "yes", "assistant", "fake")
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.id.startswith("msg_")
    assert prompts(thinker)[0] == "<system>Be\nkind.<user>Hi<assistant>"
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == len(
        thinker.seen[0].prompt
    )
    assert (whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (3, 8)
    assert whole.usage.output_tokens_details.thinking_tokens == 2
    params = thinker.seen[0].params
    assert (params.max_tokens, params.top_k, params.stop, params.temperature) == (90, 5, ["###"], 0)
    with client.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.model_dump() for block in final.content] == [
        block.model_dump() for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens, final.usage.input_tokens) == (
        "end_turn",
        8,
        whole.usage.input_tokens,
    )


def test_a_tool_is_used(client: Any, thinker: FakeEngine) -> None:
    """A loop as agents run it: what comes back goes back, thoughts where the template shows them."""
    ask: dict[str, Any] = {"model": "fake", "max_tokens": 200, "tools": FUNCTIONS}
    first = client.messages.create(messages=USER, **ask)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    use = first.content[-1]
    assert (use.name, use.input, first.stop_reason) == ("weather", {"city": "Ulm"}, "tool_use")
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "rain"}],
    }
    question = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    turns = [*USER, {"role": "assistant", "content": first.content}, question]
    client.messages.create(messages=turns, model="fake", max_tokens=9)
    assert (
        prompts(thinker)[-1] == "<user>Hi<assistant>Let me look.<tool>rain<user>So?<assistant>(hm)"
    )
    with client.messages.stream(messages=USER, **ask) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[-1].input == use.input
    assert streamed.stop_reason == "tool_use"
    client.messages.create(
        messages=USER, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **ask
    )
    named = client.messages.create(
        messages=USER, tool_choice={"type": "tool", "name": "weather"}, **ask
    )
    assert named.stop_reason == "tool_use"
    assert [request.constraint is not None for request in thinker.seen[-2:]] == [True, True]
    none = client.messages.create(messages=USER, tool_choice={"type": "none"}, **ask)
    assert [block.type for block in none.content] == ["thinking", "text"]


def test_how_answers_end(client: Any, thinker: FakeEngine) -> None:
    ask: dict[str, Any] = {"model": "fake", "messages": USER}
    cut = client.messages.create(max_tokens=2, **ask)
    assert ([block.type for block in cut.content], cut.stop_reason) == (["thinking"], "max_tokens")
    thinker.reply = "abc"
    stopped = client.messages.create(max_tokens=20, stop_sequences=["b"], **ask)
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "a",
        "stop_sequence",
        "b",
    )
    thinker.reply = written("hermes", [("weather", {"city": "Ulm"})])[:-25]
    half = client.messages.create(max_tokens=90, tools=FUNCTIONS, **ask)
    assert (half.content[-1].type, half.content[-1].input, half.stop_reason) == (
        "tool_use",
        {},
        "end_turn",
    )


def test_a_time_limit_is_no_stop_sequence(client: Any, thinker: FakeEngine) -> None:
    """vLLM's field has "timeout" where a stop string would stand, and a stop token's id; clients
    know of neither."""
    ask: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 20,
        "messages": USER,
        "stop_sequences": ["timeout", "d"],
    }
    thinker.late = True
    cut = client.messages.create(**ask)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("max_tokens", None)
    thinker.late = False
    thinker.reply = "abc"
    # a second end token, which has a name to vLLM
    thinker.eos_token_ids = frozenset(thinker.tokenizer("b")["input_ids"])
    by_token = client.messages.create(**ask)
    assert (by_token.content[0].text, by_token.stop_reason, by_token.stop_sequence) == (
        "a",
        "end_turn",
        None,
    )


def test_an_answer_goes_on_with_the_last_message(client: Any, thinker: FakeEngine) -> None:
    thinker.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# </think> #}"
    )
    client.messages.create(
        model="fake", max_tokens=9, messages=[*USER, {"role": "assistant", "content": "Well"}]
    )
    assert prompts(thinker) == ["<user>Hi<assistant>Well"]


def test_thinking_is_switched(client: Any, thinker: FakeEngine) -> None:
    """By the template's own variable; the budget is kept; `display` leaves thoughts out."""
    ask: dict[str, Any] = {"model": "fake", "max_tokens": 2000, "messages": USER}
    client.messages.create(thinking={"type": "enabled", "budget_tokens": 1024}, **ask)
    client.messages.create(thinking={"type": "disabled"}, **ask)
    hidden = client.messages.create(thinking={"type": "adaptive", "display": "omitted"}, **ask)
    assert [prompt.removeprefix("<user>Hi<assistant>") for prompt in prompts(thinker)] == [
        "[True]",
        "[False]",
        "",
    ]
    assert thinker.seen[0].params.thinking.budget == 1024
    assert [block.type for block in hidden.content] == ["text"]


@pytest.mark.parametrize(
    ("made", "kind", "message"),
    [
        (FakeEngine, "enabled", "has no separate thoughts"),
        (lambda: engine("yes"), "disabled", "without a switch"),
        (FakeEngine, "disabled", ""),
        (lambda: engine("yes"), "enabled", ""),
    ],
)
def test_thinking_that_cannot_be_switched(made: Any, kind: str, message: str) -> None:
    with serving(made()) as server:
        answer = server.post(
            URL, json={"max_tokens": 9, "messages": USER, "thinking": {"type": kind}}
        )
    assert answer.status_code == (400 if message else 200)
    assert message in answer.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_config": {"effort": "low"}}, "knows no 'output_config.effort'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strng"}}}},
            "output_config.format.schema",
        ),
        ({"stop_sequences": [""]}, "'stop_sequences.0' must not be empty"),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]},
                ]
            },
            "messages.1.content.0.name: ",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "Give it as a function"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no tools of its own"),
    ],
)
def test_errors_name_what_the_client_wrote(fields: dict[str, Any], message: str) -> None:
    """In Anthropic's shape errors have no place for a field: the message says which."""
    with serving(FakeEngine(context=1000)) as server:
        answer = server.post(URL, json={"max_tokens": 9, "messages": USER, **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_tokens_are_counted(client: Any, thinker: FakeEngine) -> None:
    """The count equals the answer's own usage, tools and system included; no answer is made."""
    ask: dict[str, Any] = {
        "model": "fake",
        "messages": USER,
        "system": "Be kind.",
        "tools": FUNCTIONS,
    }
    count = client.messages.count_tokens(**ask).input_tokens
    assert thinker.seen == []
    usage = client.messages.create(max_tokens=5, **ask).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_refusals_are_its_own(client: Any, thinker: FakeEngine) -> None:
    ask: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": USER}
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client.messages.create(**{**ask, "model": "gpt"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError, match="wrong"):
        client.with_options(api_key="other").messages.create(**ask)
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    for fields, message in (
        ({"messages": [{"role": "user", "content": [image]}]}, "'image' is not supported"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "web_search_20250305.*no tools of its own",
        ),
        ({"tool_choice": {"type": "any"}}, "needs 'tools'"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"messages": [{"role": "user", "content": []}]}, "is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "does not belong to role 'user'",
        ),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "needs type: enabled"),
        ({"output_config": {"effort": "low"}}, "knows no 'output_config.effort'"),
        (
            {
                "extra_body": {
                    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}
                }
            },
            "shorten the conversation",
        ),
    ):
        with pytest.raises(anthropic.BadRequestError, match=message) as caught:
            client.messages.create(**{**ask, **fields})
        assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_a_form_and_a_failure_in_the_stream(client: Any, thinker: FakeEngine) -> None:
    from outrider.serve.errors import ApiError

    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    client.messages.create(model="fake", max_tokens=50, messages=USER, output_config=form)
    assert thinker.seen[0].constraint is not None
    thinker.reply = ApiError("it broke", status=500)
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        list(client.messages.create(model="fake", max_tokens=50, messages=USER, stream=True))


def test_what_has_no_effect_is_named() -> None:
    """Agents send such fields."""
    cached = {"type": "ephemeral"}
    turn = [
        {"type": "thinking", "thinking": "hm", "signature": "abc"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "tool_use", "id": "a", "name": "now", "input": {}},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": "no",
        "is_error": True,
        "cache_control": cached,
    }
    body = {
        "max_tokens": 50,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": cached}],
        "service_tier": "auto",
        "messages": [
            *USER,
            {"role": "assistant", "content": turn},
            {"role": "user", "content": [result]},
        ],
        "tools": [{**FUNCTIONS[1], "cache_control": cached}],
        "thinking": {"type": "adaptive", "display": "summarized"},
        "mcp_servers": [],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    fake = FakeEngine(context=1000)
    fake.tokenizer.chat_template += TEMPLATES["hermes"]
    with serving(fake) as client:
        response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    assert set(response.headers[IGNORED_HEADER].split(", ")) == {
        "service_tier",
        "mcp_servers",
        "system[].cache_control",
        "messages[].content[].data",
        "messages[].content[].is_error",
        "messages[].content[].cache_control",
        "messages[].content[].thinking",
        "tools[].cache_control",
        "thinking.display",
    }
    assert json.loads(response.text)["stop_reason"] == "end_turn"


def test_models_as_the_package_lists_them(client: Any) -> None:
    """Its pages and its errors, although the path is OpenAI's, too; `anthropic-version` tells them
    apart."""
    [listed] = list(client.models.list(limit=5))
    assert (listed.id, listed.display_name, listed.type, listed.max_input_tokens) == (
        "fake",
        "fake",
        "model",
        2000,
    )
    assert client.models.retrieve("fake") == listed
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("fable")
    assert caught.value.body["error"]["type"] == "not_found_error"
