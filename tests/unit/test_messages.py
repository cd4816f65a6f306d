"""Calls in the history reach every kind of chat template, whatever a model wrote as their
arguments, over every interface."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.messages import encode_conversation
from tests.helpers import byte_tokenizer
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import serving

SHOWN = "> {% for m in messages %}{% for c in m.tool_calls or [] %}HERE{% endfor %}{% endfor %}"
# DeepSeek R1 and V3
JOINED = SHOWN.replace("HERE", "{{ '<call>' + c.function.name + '\n' + c.function.arguments }}")
# GLM, MiniMax
ITEMS = SHOWN.replace(
    "HERE", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
)
# Qwen3-Coder
PAIRS = SHOWN.replace(
    "HERE", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}"
)
AS_JSON = SHOWN.replace("HERE", "{{ c.function.arguments | tojson }}")  # Qwen, Llama, Mistral
STRICT = SHOWN.replace(  # some look first
    "HERE",
    "{% if c.function.arguments is mapping %}{{ raise_exception('text, please') }}{% endif %}{{ "
    "c.function.arguments }}",
)
CUT_OFF = '{"path": '
Body = tuple[str, dict[str, Any]]


def chat_of(arguments: Any) -> Body:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "y"}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        result,
    ]
    return "/v1/chat/completions", {"messages": messages}


def tokenize_of(arguments: Any) -> Body:
    return "/tokenize", chat_of(arguments)[1]


def responses_of(arguments: Any) -> Body:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    items = [
        {"role": "user", "content": "x"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "y"},
    ]
    return "/v1/responses", {"input": items, "instructions": "Be kind."}


def messages_of(value: Any) -> Body:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": value}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "y"}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return "/v1/messages", {"messages": turns, "system": "Be kind.", "max_tokens": 3}


def post(template: str, body: Body) -> tuple[Any, str]:
    """(the answer, the prompt that the engine saw)."""
    engine = FakeEngine(context=1000)
    engine.tokenizer.chat_template = template
    with serving(engine) as client:
        answer = client.post(
            body[0], content=json.dumps(body[1]), headers={"Content-Type": "application/json"}
        )
    return answer, engine.tokenizer.decode(engine.seen[0].prompt).removeprefix(
        "> "
    ) if engine.seen else ""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (JOINED, '<call>look\n{"path": "Zürich"}'),
        (STRICT, '{"path": "Zürich"}'),
        (AS_JSON, '{"path": "Zürich"}'),
        (ITEMS, "path=Zürich;"),
        (PAIRS, "path=Zürich;"),
    ],
    ids=["joined", "strict", "json", "items", "pairs"],
)
@pytest.mark.parametrize(
    "body",
    [
        chat_of('{"path": "Zürich"}'),
        responses_of('{"path": "Zürich"}'),
        messages_of({"path": "Zürich"}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_every_kind_of_template_is_given_what_it_takes(
    template: str, expected: str, body: Body
) -> None:
    """Catches an agent whose second turn is a 400 because a template joins texts, or is given texts
    where it looks inside."""
    answer, prompt = post(template, body)
    assert answer.status_code == 200, answer.text
    assert prompt == expected


def test_the_text_is_the_one_that_the_model_wrote() -> None:
    """Its spaces and numbers are part of the prefix that the cache holds."""
    written = '{ "a":1.50,  "b" : "\\u00e9" }'
    assert post(JOINED, chat_of(written))[1] == f"<call>look\n{written}"


@pytest.mark.parametrize("template", [JOINED, ITEMS, PAIRS, AS_JSON, STRICT])
@pytest.mark.parametrize(
    "body",
    [
        *map(chat_of, ("null", None, "", " ")),
        *map(responses_of, ("null", None, "", " ")),
        messages_of(None),
    ],
    ids=str,
)
def test_no_arguments_are_an_empty_object(template: str, body: Body) -> None:
    answer, prompt = post(template, body)
    assert answer.status_code == 200, answer.text
    assert prompt == {JOINED: "<call>look\n{}", AS_JSON: "{}", STRICT: "{}"}.get(template, "")


@pytest.mark.parametrize("arguments", [CUT_OFF, '["a"]', '"a"', "3", '{"a": "\\ud83d"}'])
@pytest.mark.parametrize(
    ("form", "place"),
    [
        (chat_of, "message 1 has"),
        (tokenize_of, "message 1 has"),
        (responses_of, "item 1 of 'input' has"),
    ],
)
def test_what_a_template_cannot_take_is_named_with_its_message(
    arguments: str, form: Callable[[Any], Body], place: str
) -> None:
    """Counted as the client counts, whose instructions are no message."""
    for template in (ITEMS, PAIRS):
        answer, _ = post(template, form(arguments))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith(
            f"{place} a call of 'look' whose arguments cannot be read as a JSON object"
        )
        assert repr(arguments) in error["message"]
        assert error["param"] == ("input" if form is responses_of else "messages")


@pytest.mark.parametrize("value", [CUT_OFF, ["a"], 3, {"a": "\ud83d"}])
def test_anthropic_inputs_that_are_no_objects_are_named_with_their_message(value: Any) -> None:
    answer, _ = post(ITEMS, messages_of(value))
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert "messages.1.content.0.input" in said or said.startswith("message 1 has a call of 'look'")


def test_a_call_of_an_earlier_response_is_named_as_one() -> None:
    asked = "the conversation before 'input' has a call of"
    engine = FakeEngine(context=1000)
    engine.tokenizer.chat_template = ITEMS
    with serving(engine) as client:
        path, body = responses_of("{}")
        first = client.post(path, json=body).json()
        stored = client.state.responses.find(first["id"])
        stored.own_input[1]["arguments"] = CUT_OFF
        answer = client.post(path, json={"input": "go on", "previous_response_id": first["id"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(asked)


@pytest.mark.parametrize("arguments", [CUT_OFF, '["a"]'])
def test_templates_that_take_any_text_are_given_it(arguments: str) -> None:
    answer, prompt = post(JOINED, chat_of(arguments))
    assert answer.status_code == 200, answer.text
    assert prompt == f"<call>look\n{arguments}"


def test_other_refusals_do_not_blame_a_call() -> None:
    """A template that fails for its own reasons says those, though the history has a call."""
    for arguments in ('{"a": 1}', CUT_OFF):
        answer, _ = post("{{ raise_exception('one at a time') }}", chat_of(arguments))
        assert (
            answer.json()["error"]["message"]
            == "the chat template refused the messages: one at a time"
        )


@pytest.mark.parametrize(
    ("arguments", "expected"), [({"a": "é"}, '{"a": "é"}'), ('{"a":1}', '{"a":1}'), (None, "{}")]
)
def test_arguments_from_python_may_be_objects(arguments: Any, expected: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = JOINED
    messages = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
    ]
    assert (
        tokenizer.decode(encode_conversation(tokenizer, messages, JOINED))
        == f"> <call>f\n{expected}"
    )
    tokenizer.chat_template = ITEMS
    messages[0]["tool_calls"] = [{"function": {"name": "f", "arguments": CUT_OFF}}]
    with pytest.raises(
        RequestError, match="message 0 has a call of 'f' whose arguments cannot be read"
    ):
        encode_conversation(tokenizer, messages, ITEMS)
