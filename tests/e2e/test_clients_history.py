"""The `openai` package's and LangChain's own forms of answers, put back into the history, and
fields that only clients know.

The demo's target with a chat template that renders tools, calls, their results and thoughts.
"""

from __future__ import annotations

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
{%- for message in messages %}{{ message.content }}{{ message.reasoning_content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}Answer:"""
PARAMETERS = {
    "type": "object", "properties": {"fruit": {"enum": ["lemon", "apple"]}}, "required": ["fruit"], "additionalProperties": False,
}  # fmt: skip
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
QUESTION: dict[str, Any] = {"role": "user", "content": DEMO_PROMPTS[0]}
HEADER = "x-outrider-ignored-fields"


@pytest.fixture(scope="module")
def address(tmp_path_factory: Any) -> Iterator[str]:
    with live_demo(tmp_path_factory.mktemp("model") / "caller", TEMPLATE, "demo") as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120)


def ask(client: Any, *messages: Any, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_completion_tokens": 40} | fields
    return client.chat.completions.create(model="demo", messages=list(messages), **fields)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


HOW = [{}, {"exclude_none": False}, {"exclude_unset": True}]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_an_answer_goes_back_as_the_package_dumps_it(client: Any, how: dict[str, Any]) -> None:
    """With `annotations: null` and all the rest; what is null must not reach the template either."""
    message = ask(client, QUESTION).choices[0].message
    plain = text_of(
        ask(client, QUESTION, {"role": "assistant", "content": message.content}, QUESTION)
    )
    assert text_of(ask(client, QUESTION, message.model_dump(**how), QUESTION)) == plain
    assert text_of(ask(client, QUESTION, message, QUESTION)) == plain


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_call_and_its_result_go_back_as_the_package_dumps_them(
    client: Any, how: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {
        "tools": [LOOK_UP],
        "parallel_tool_calls": False,
        "max_completion_tokens": 300,
    }
    message = ask(client, QUESTION, tool_choice="required", **fields).choices[0].message
    assert message.content is None
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "name": "look_up",
        "content": "19",
    }
    raw = client.chat.completions.with_raw_response
    second = raw.create(
        model="demo",
        messages=[QUESTION, message.model_dump(**how), result],
        temperature=0,
        **fields,
    )
    assert HEADER not in second.headers
    last = second.parse().choices[0].message.model_dump(**how)
    assert text_of(ask(client, QUESTION, message.model_dump(**how), result, last, QUESTION))


def test_langchain_carries_calls_and_results(address: str) -> None:
    chat_models = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    settings = {
        "model": "demo",
        "base_url": f"{address}/v1",
        "api_key": KEY,
        "max_retries": 0,
        "temperature": 0,
    }
    model = chat_models.ChatOpenAI(max_tokens=300, store=True, service_tier="flex", **settings)
    history: list[Any] = [
        HumanMessage(
            [{"type": "text", "text": DEMO_PROMPTS[0], "cache_control": {"type": "ephemeral"}}]
        )
    ]
    calls = model.bind_tools([LOOK_UP], tool_choice="required", parallel_tool_calls=False).invoke(
        history
    )
    history += [calls, ToolMessage("19", tool_call_id=calls.tool_calls[0]["id"], name="look_up")]
    history += [model.bind(max_tokens=20).invoke(history), HumanMessage("And now?")]
    assert model.bind(max_tokens=20).invoke(history).content


def test_thoughts_reach_the_template_under_either_name(client: Any) -> None:
    lengths = [
        ask(
            client, QUESTION, {"role": "assistant", "content": "19", **thoughts}, QUESTION
        ).usage.prompt_tokens
        for thoughts in ({}, {"reasoning": "37 - 18 = 19"}, {"reasoning_content": "37 - 18 = 19"})
    ]
    assert lengths[0] < lengths[1] == lengths[2]


def test_every_chunk_counts_when_asked(client: Any) -> None:
    """`continuous_usage_stats`, with speculation: counts of tokens, not of chunks."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = ask(client, QUESTION, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    *texts, last = client.completions.create(
        model="demo",
        prompt=DEMO_PROMPTS[0],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options=options,
    )
    assert [text.usage.completion_tokens for text in texts][-1] == last.usage.completion_tokens


def test_nearly_zero_is_greedy(client: Any) -> None:
    greedy = text_of(ask(client, QUESTION))
    nearly = (
        {"temperature": 1e-8},
        {"temperature": 9e-5},
        {"temperature": 1, "top_p": 0},
        {"max_completion_tokens": 40.0},
    )
    assert [text_of(ask(client, QUESTION, **fields)) for fields in nearly] == [greedy] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_fields_without_effect_are_named_in_a_header(client: Any, stream: bool) -> None:
    part = {"type": "text", "text": DEMO_PROMPTS[0], "cache_control": {"type": "ephemeral"}}
    answer = client.chat.completions.with_raw_response.create(
        model="demo",
        messages=[{"role": "user", "content": [part]}],
        max_tokens=4,
        stream=stream,
        store=True,
        extra_body={"temprature": 1},
    )
    assert answer.headers[HEADER] == "store, temprature, messages[].content[].cache_control"
