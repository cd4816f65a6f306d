"""A real published model behind the server, SmolLM2-135M-Instruct from its GGUF file in 4 bits:
clients and the page ask it."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

import openai

from outrider.models.loading.load import load_tokenizer
from outrider.models.source import resolve
from tests.live_server import KEY, live_server

pytestmark = pytest.mark.slow

CAPITAL = "What is the capital of France? Answer in one short sentence."
REPEATING = (
    "Repeat this text word for word, then say in one sentence what it is about: The lighthouse keeper climbs the stairs "
    "every evening, lights the lamp, winds the clock and writes the weather into the log. Every morning the lighthouse "
    "keeper climbs the stairs again, puts out the lamp, winds the clock and writes the weather into the log."
)
ADDING = "Write a Python function add(a, b) that returns the sum of a and b, and three asserts that test it."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather in a city.",
        "parameters": {
            "type": "object", "required": ["city", "unit"], "additionalProperties": False,
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "kelvin"]}},
        },
    },
}  # fmt: skip
TOOLS_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You call functions. These are there:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% endif %}"""  # the model's own template has no place for tools


@pytest.fixture(scope="module")
def address(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("smollm")
    file = next(smollm.glob("*.gguf"))
    (folder / file.name).symlink_to(file)
    tokenizer: Any = load_tokenizer(resolve(str(smollm)))
    tokenizer.chat_template = TOOLS_TEMPLATE + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    with live_server(
        str(folder), "--drafter", "suffix", "--served-model-name", "smollm"
    ) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120)


def ask(client: Any, question: str, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_completion_tokens": 64} | fields
    return client.chat.completions.create(
        model="smollm", messages=[{"role": "user", "content": question}], **fields
    )


def test_a_chat_answers_and_streams_the_same_text(client: Any) -> None:
    """Catches a chat template, end tokens or a tokenizer that are not this model's: it answers, and
    stops by itself."""
    whole = ask(client, CAPITAL)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert "<|im_" not in text
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(ask(client, CAPITAL, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_response_answers_and_goes_on(client: Any) -> None:
    first = client.responses.create(
        model="smollm", input=CAPITAL, temperature=0, max_output_tokens=48
    )
    assert (first.status, "Paris" in first.output_text) == ("completed", True)
    asked = "And of Italy? Answer in one short sentence."
    then = client.responses.create(
        model="smollm",
        input=asked,
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=48,
    )
    assert then.usage.input_tokens > first.usage.input_tokens
    assert "Rome" in then.output_text


def test_a_tool_is_called_by_its_grammar(client: Any) -> None:
    """A model of this size writes no call by itself: the grammar makes it one that fits the schema."""
    choice = {"type": "function", "function": {"name": "get_weather"}}
    done = ask(
        client, "What is the weather in Paris, in celsius?", tools=[WEATHER], tool_choice=choice
    ).choices[0]
    (call,) = done.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, sorted(arguments)) == ("get_weather", ["city", "unit"])
    assert arguments["unit"] in ("celsius", "kelvin")
    assert isinstance(arguments["city"], str)


@pytest.mark.parametrize("question", [REPEATING, ADDING])
def test_greedy_text_is_the_same_with_and_without_drafts(client: Any, question: str) -> None:
    """And drafts are accepted: the answers repeat words of the question and their own."""
    fields = {"max_completion_tokens": 128}
    plain = ask(client, question, extra_body={"speculation": {"mode": "off"}}, **fields)
    drafted = ask(
        client,
        question,
        extra_body={"speculation": {"mode": "fixed", "max_draft_tokens": 7}},
        **fields,
    )
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens
    assert drafted.metrics["lossless"]
    assert drafted.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert plain.metrics["speculative_decoding"] is None


def test_the_playground_is_answered(address: str) -> None:
    """The page, and the two requests that it sends to show an answer with drafts beside one without
    (playground/stream.js)."""
    with urllib.request.urlopen(f"{address}/", timeout=60) as response:
        assert "playground" in response.read().decode().lower()
    with_drafts, without = (
        streamed(address, one) for one in ({"mode": "auto", "drafter": "suffix"}, {"mode": "off"})
    )
    assert with_drafts[0] == without[0]
    assert with_drafts[1]["accepted"] > 0
    assert set(without[1]) == {"plain"}
    assert with_drafts[1].total() == without[1].total()


def streamed(address: str, speculation: dict[str, Any]) -> tuple[str, Counter[str]]:
    """The text, and how many tokens came to be in each way."""
    body = {
        "model": "smollm",
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_origins": True,
        "temperature": 0,
        "max_tokens": 96,
        "speculation": speculation,
        "separate_reasoning": False,
        "messages": [{"role": "user", "content": REPEATING}],
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = [
            line.removeprefix("data: ")
            for line in response.read().decode().splitlines()
            if line.startswith("data: ")
        ]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    origins = Counter(
        origin for choice in choices for _, origin in choice.get("token_origins") or ()
    )
    return "".join(choice["delta"].get("content") or "" for choice in choices), origins
