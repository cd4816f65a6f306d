"""Real clients against a real server: the `openai` package, LangChain and curl, with the demo pair.

The demo's target answers word problems and is sure of its answers, so texts are known in advance.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("openai")

import openai

from outrider.build import Options, build
from outrider.demo import DEMO_PROMPTS
from outrider.engine.prefill import reads_any_way
from tests.live_server import KEY, live_server

pytestmark = pytest.mark.slow

LEMONS = DEMO_PROMPTS[0].removeprefix("Question: ").removesuffix("\nAnswer:")
EGGS = DEMO_PROMPTS[4].removeprefix("Question: ").removesuffix("\nAnswer:")
OFF = {"speculation": {"mode": "off"}}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live_server("demo", "--drafter", "draft-model", "--num-draft-tokens", "4") as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120)


def ask(client: Any, question: str = LEMONS, **fields: Any) -> Any:
    """One greedy answer, unless `fields` say otherwise."""
    fields = {"temperature": 0, "max_completion_tokens": 80} | fields
    return client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": question}], **fields
    )


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


# ---- openai: answers


def test_models_are_listed(client: Any) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["demo"]
    assert client.models.retrieve("demo").max_model_len == 1024


def test_other_interfaces_give_the_same_answer(address: str, client: Any) -> None:
    """A conversation that goes on, in three interfaces: greedy text is one text, and drafts are
    made for all."""
    first = ask(client)
    one = client.responses.create(model="demo", input=LEMONS, temperature=0, max_output_tokens=80)
    assert one.output_text == text_of(first)
    turns = [
        {"role": "user", "content": LEMONS},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": EGGS},
    ]
    ask_again: dict[str, Any] = {"model": "demo", "temperature": 0}
    second = client.chat.completions.create(messages=turns, max_completion_tokens=80, **ask_again)
    events = list(
        client.responses.create(
            input=EGGS, previous_response_id=one.id, max_output_tokens=80, stream=True, **ask_again
        )
    )
    assert events[-1].response.output_text == text_of(second)
    assert events[-1].response.usage.input_tokens == second.usage.prompt_tokens
    assert one.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    anthropic = pytest.importorskip("anthropic")
    other = anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0, timeout=120)
    fields: dict[str, Any] = {"model": "demo", "messages": turns, "extra_body": {"temperature": 0}}
    with other.messages.stream(max_tokens=80, **fields) as stream:
        message = stream.get_final_message()
    assert "".join(block.text for block in message.content) == text_of(second)
    assert message.stop_reason == "end_turn"
    count = other.messages.count_tokens(model="demo", messages=turns).input_tokens
    assert count == second.usage.prompt_tokens


def test_chat_answers_and_counts(client: Any) -> None:
    """Usage that does not add up, or numbers of speculation that are not this request's."""
    answer = ask(client)
    assert "#### 19" in text_of(answer)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    drafting = answer.model_extra["metrics"]["speculative_decoding"]
    assert 0 < drafting["num_accepted_draft_tokens"] <= drafting["num_draft_tokens"]
    assert drafting["mean_acceptance_length"] > 1


def test_speculation_changes_no_text(client: Any) -> None:
    """Greedy, and sampled with a seed: with, without, and with other lengths."""
    for fields in (
        {"temperature": 0},
        {"temperature": 1, "seed": 11},
        {"temperature": 0.7, "top_p": 0.9, "seed": 12},
    ):
        plain = ask(client, EGGS, **fields, extra_body=OFF)
        assert plain.model_extra["metrics"]["speculative_decoding"] is None
        for length in (1, 4):
            fixed = {"speculation": {"mode": "fixed", "max_draft_tokens": length}}
            assert text_of(ask(client, EGGS, **fields, extra_body=fixed)) == text_of(plain)
        assert text_of(ask(client, EGGS, **fields)) == text_of(plain)


def test_a_prediction_is_drafted_from_and_changes_no_text(client: Any) -> None:
    """Predicted outputs: the answer itself, one with other numbers, and one that is off; greedy,
    and sampled with a seed."""
    for fields in ({"temperature": 0}, {"temperature": 1, "seed": 11}):
        plain = ask(client, EGGS, **fields, extra_body=OFF)
        assert plain.usage.completion_tokens_details is None
        wrong = "".join("7" if letter.isdigit() else letter for letter in text_of(plain))
        counts = []
        for text in (text_of(plain), wrong):
            answer = ask(client, EGGS, **fields, prediction={"type": "content", "content": text})
            assert text_of(answer) == text_of(plain)
            assert answer.model_extra["metrics"]["drafter"] == "prediction"
            counts.append(answer.usage.completion_tokens_details.accepted_prediction_tokens)
        assert counts[0] > plain.usage.completion_tokens * 0.7  # seven of eight, in the best case
        assert 0 < counts[1] < counts[0]
        off = ask(
            client,
            EGGS,
            **fields,
            prediction={"type": "content", "content": text_of(plain)},
            extra_body=OFF,
        )
        details = off.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_stream_is_the_same_answer_in_pieces(client: Any) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    whole = ask(client)
    assert "".join(choice.delta.content or "" for choice in choices) == text_of(whole)
    assert len(choices) > 3
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_conversation_goes_on_and_reuses_its_prompt(client: Any) -> None:
    first = [{"role": "user", "content": EGGS}]
    one = client.chat.completions.create(model="demo", messages=first, temperature=0, max_tokens=80)
    then = [
        *first,
        {"role": "assistant", "content": text_of(one)},
        {"role": "user", "content": LEMONS},
    ]
    two = client.chat.completions.create(model="demo", messages=then, temperature=0, max_tokens=80)
    assert "####" in text_of(two)
    assert two.usage.prompt_tokens > one.usage.prompt_tokens
    target = build(Options("demo", drafter="none")).target.lm
    # else only whole chunks of 512: on some processors a text's bits follow its cuts
    few_are_shared = reads_any_way(target)
    assert (two.usage.prompt_tokens_details.cached_tokens > 0) == few_are_shared


def test_length_limit_is_kept_and_named(client: Any) -> None:
    answer = ask(client, max_completion_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_stop_ends_the_text_before_it(client: Any) -> None:
    """A stop string in the middle of accepted draft tokens is where it slips through."""
    whole = text_of(ask(client))
    stopped = ask(client, stop=["####"])
    assert text_of(stopped) == whole[: whole.index("####")]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in ask(client, stop=["####"], stream=True)
    )
    assert streamed == text_of(stopped)


def test_n_answers_with_seeds_of_their_own(client: Any) -> None:
    """Answer i of a seeded request is the answer to seed + i, and all arrive under their index."""
    several = ask(client, EGGS, n=3, temperature=1.5, seed=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    alone = [text_of(ask(client, EGGS, temperature=1.5, seed=5 + number)) for number in range(3)]
    assert [choice.message.content for choice in several.choices] == alone
    assert len(set(alone)) > 1


def test_logprobs_are_the_targets_own(client: Any) -> None:
    """Greedy tokens are the likeliest of their alternatives; the tokens make up the text."""
    answer = ask(client, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries if entry.token != "</s>") == text_of(answer)
    for entry in entries:
        likeliest = max(entry.top_logprobs, key=lambda top: top.logprob)
        assert entry.logprob == pytest.approx(likeliest.logprob)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-4
    plain = ask(client, logprobs=True, top_logprobs=3, extra_body=OFF)
    both = zip(entries, plain.choices[0].logprobs.content, strict=True)
    assert all(one.logprob == pytest.approx(other.logprob, abs=0.05) for one, other in both)


def test_completions_with_their_own_fields(client: Any) -> None:
    """echo, logprobs, several prompts, n and token ids, as the older endpoint has them."""
    answer = client.completions.create(
        model="demo",
        prompt=[DEMO_PROMPTS[0], DEMO_PROMPTS[4]],
        n=2,
        echo=True,
        logprobs=2,
        temperature=0,
        max_tokens=60,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.choices[0].text.startswith(DEMO_PROMPTS[0])
    assert answer.choices[2].text.startswith(DEMO_PROMPTS[4])
    assert "#### 19" in answer.choices[0].text
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert answer.choices[0].text[logprobs.text_offset[-2] :].startswith(logprobs.tokens[-2])


def test_logit_bias_is_obeyed(client: Any, address: str) -> None:
    """A token that is forbidden must not come, drafted or not."""
    word = "####"
    tokens = post(address, "/tokenize", {"prompt": word, "add_special_tokens": False})["tokens"]
    answer = ask(client, logit_bias={str(tokens[0]): -100})
    assert word not in text_of(answer)


# ---- openai: many at once


def test_async_answers_do_not_depend_on_their_company(client: Any, address: str) -> None:
    """Eight at once, mixed: greedy and seeded, with and without speculation. Each must say what it
    says alone."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 1},
        {"temperature": 1, "seed": 2, "extra_body": OFF},
        {"temperature": 0.8, "top_k": 20, "seed": 3},
    ]
    for kind in kinds:
        if "top_k" in kind:
            kind["extra_body"] = {"top_k": kind.pop("top_k")}
    jobs = [(question, kind) for question in (LEMONS, EGGS) for kind in kinds]
    alone = [text_of(ask(client, question, **kind)) for question, kind in jobs]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120
        ) as many:
            return [
                text_of(answer)
                for answer in await asyncio.gather(
                    *(ask(many, question, **kind) for question, kind in jobs)
                )
            ]

    assert asyncio.run(together()) == alone


def test_async_stream(address: str) -> None:
    async def streamed() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120
        ) as many:
            return "".join(
                [
                    chunk.choices[0].delta.content or ""
                    async for chunk in await ask(many, stream=True)
                ]
            )

    assert "#### 19" in asyncio.run(streamed())


def test_leaving_a_stream_ends_its_request(client: Any, address: str) -> None:
    """A client that goes away must not leave its row running to the end of the context."""
    stream = ask(client, stream=True, max_completion_tokens=900, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 30
    while running(address) and time.monotonic() < until:
        time.sleep(0.1)
    assert running(address) == 0


def running(address: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (value,) = [
        line.rsplit(" ", 1)[1]
        for line in lines
        if line.startswith("outrider:num_requests_running{")
    ]
    return float(value)


# ---- openai: refusals


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"speculation": {"mode": "sometimes"}}}, "mode"),
        ({"extra_body": {"speculation": {"drafter": "nobody"}}}, "nobody"),
        ({"question": "word " * 2000}, "1024"),
        ({"top_logprobs": 2}, "logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: Any, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert named in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


def test_wrong_model_and_wrong_key(client: Any, address: str) -> None:
    with pytest.raises(openai.NotFoundError, match="demo"):
        client.chat.completions.create(model="dmeo", messages=[{"role": "user", "content": LEMONS}])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()


# ---- openai: structured output


class Count(BaseModel):
    """What the model, which never learnt JSON, must be held to by the grammar."""

    thing: Literal["lemons", "eggs"]
    number: int = Field(ge=0, le=99)


def test_structured_output_is_parsed(client: Any) -> None:
    """With and without speculation: draft paths must be masked too."""
    for extra in ({}, OFF):
        answer = client.chat.completions.parse(
            model="demo",
            messages=[{"role": "user", "content": LEMONS}],
            response_format=Count,
            temperature=0,
            max_completion_tokens=600,
            extra_body=extra,
        )
        assert isinstance(answer.choices[0].message.parsed, Count)


def test_json_mode(client: Any) -> None:
    answer = ask(client, response_format={"type": "json_object"}, max_completion_tokens=300)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text_of(answer)), dict)
    else:
        assert text_of(answer).lstrip().startswith("{")


def test_tools_are_refused_where_the_model_could_not_see_them(client: Any) -> None:
    """Tools themselves: test_clients_calls.py. The demo's own template has no place for them."""
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    with pytest.raises(openai.BadRequestError, match="template"):
        ask(client, tools=[tool])


# ---- LangChain


def test_langchain(address: str) -> None:
    """invoke, stream and batch of ChatOpenAI, and its structured output."""
    chat_models = pytest.importorskip("langchain_openai")
    settings = {"model": "demo", "base_url": f"{address}/v1", "api_key": KEY, "max_retries": 0}
    model = chat_models.ChatOpenAI(temperature=0, max_tokens=80, **settings)
    answer = model.invoke(LEMONS)
    assert "#### 19" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(LEMONS)) == answer.content
    assert [one.content for one in model.batch([LEMONS, LEMONS])] == [answer.content] * 2
    held = chat_models.ChatOpenAI(temperature=0, max_tokens=600, **settings).with_structured_output(
        Count, method="json_schema"
    )
    assert isinstance(held.invoke(LEMONS), Count)


# ---- curl


def curl(address: str, path: str, *arguments: str, key: str = KEY) -> str:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("no curl")
    command = [
        program,
        "-sS",
        "-N",
        "--max-time",
        "120",
        "-H",
        f"Authorization: Bearer {key}",
        *arguments,
        address + path,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def post(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(curl(address, path, "--json", json.dumps(body))))


def test_curl_streams_events(address: str) -> None:
    body = {
        "messages": [{"role": "user", "content": LEMONS}],
        "stream": True,
        "temperature": 0,
        "return_token_origins": True,
    }
    lines = [
        line
        for line in curl(address, "/v1/chat/completions", "--json", json.dumps(body)).splitlines()
        if line
    ]
    assert lines[-1] == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert "#### 19" in text
    origins = [pair for choice in choices for pair in choice.get("token_origins") or []]
    assert "".join(piece for piece, _ in origins) == text
    assert "accepted" in {fate for _, fate in origins}


def test_curl_small_endpoints(address: str) -> None:
    assert json.loads(curl(address, "/health"))["status"] == "ok"
    assert json.loads(curl(address, "/ready"))["status"] == "ready"
    assert json.loads(curl(address, "/version"))["version"]
    assert "outrider:" in curl(address, "/metrics")
    tokens = post(address, "/tokenize", {"prompt": LEMONS, "add_special_tokens": False})["tokens"]
    assert post(address, "/detokenize", {"tokens": tokens})["prompt"] == LEMONS
    assert "Outrider playground" in curl(address, "/", key="none")


def test_curl_bodies_that_are_none(address: str) -> None:
    """Not JSON, not UTF-8, not an object: a 400 in OpenAI's shape, never a 500."""
    for data in ("{", "\\xff", "[]", '"text"', "null", '{"messages": NaN}'):
        arguments = ["-H", "Content-Type: application/json", "--data-binary", data]
        answer = curl(address, "/v1/chat/completions", *arguments, "-w", "\n%{http_code}")
        body, status = answer.rsplit("\n", 1)
        assert status == "400", (data, answer)
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
