"""Addresses, bodies, streams of every dialect, and the client against a server that behaves and one
that does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError, OutriderError, RequestError, ServerError
from outrider.lab.bench.bench_result import MeasuredAnswer
from outrider.lab.server.client import (
    Client,
    RequestOptions,
    ServerEndpoint,
    Stream,
    key_from,
    mended,
)
from outrider.lab.workload.types import WorkloadRequest
from outrider.sampling.params import SamplingParams
from tests.unit.lab.server.fake_server import MODEL, Fake

PROMPT = WorkloadRequest(id="p1", prompt="Hello")
CONVERSATION = WorkloadRequest(id="p2", messages=({"role": "user", "content": "Hello"},))
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://host:8000", "http://host:8000"),
        (" http://host:8000/ ", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/api/v1/chat/completions", "https://host/api"),
        ("https://host/v1beta", "https://host/v1beta"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_root_is_where_metrics_lie(url: str, root: str) -> None:
    """A path that is cut at the wrong character asks /v1/v1/models."""
    assert ServerEndpoint.parse(url).root == root


@pytest.mark.parametrize(
    "url",
    [
        "host:8000",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://[::1",
        "",
        "http://-\x01:80",
    ],
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError):
        ServerEndpoint.parse(url)


@pytest.mark.parametrize("url", ["http://me:secret@host", "http://host/?key=secret"])
def test_secrets_in_a_url_would_be_in_results(url: str) -> None:
    with pytest.raises(ConfigError, match="environment") as error:
        ServerEndpoint.parse(url)
    assert "secret" not in str(error.value)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", " sk-1\n")
    assert key_from("SERVER_KEY") == "sk-1"
    assert key_from(None) is None
    assert "sk-1" not in repr(ServerEndpoint.parse("http://host", api_key="sk-1"))
    monkeypatch.setenv("SERVER_KEY", "sk\n1")
    with pytest.raises(ConfigError, match="header"):
        key_from("SERVER_KEY")
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match="SERVER_KEY"):
        key_from("SERVER_KEY")


def test_only_what_was_asked_for_is_sent() -> None:
    """A parameter at its default must stay the server's."""
    path, body = RequestOptions(sampling=SamplingParams(max_tokens=7, top_k=5)).body(PROMPT, "m")
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": "Hello",
        "temperature": 0.0,
        "max_tokens": 7,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_conversations_and_prompts_find_their_way() -> None:
    assert RequestOptions().body(CONVERSATION, "m")[0] == "/v1/chat/completions"
    path, body = RequestOptions(api="chat").body(PROMPT, "m")
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    with pytest.raises(ConfigError, match="chat template"):
        RequestOptions(api="completions").body(CONVERSATION, "m")


def test_a_logged_length_is_a_limit_not_a_wish() -> None:
    request = WorkloadRequest(id="1", prompt="x", max_tokens=5)
    assert (
        RequestOptions(sampling=SamplingParams(max_tokens=9)).body(request, "m")[1]["max_tokens"]
        == 5
    )
    assert (
        RequestOptions(sampling=SamplingParams(max_tokens=3)).body(request, "m")[1]["max_tokens"]
        == 3
    )


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"timeout_s": 0}])
def test_options_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RequestOptions(**options)


# ---------------------------------------------------------------- streams


def played(*events: Any) -> Stream:
    """One event a second."""
    stream = Stream()
    for index, event in enumerate(events):
        stream.feed(event if isinstance(event, str) else json.dumps(event), float(index + 1))
    return stream


def text(content: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": reason}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def test_completions() -> None:
    """The end of the text counts: usage and end mark come later."""
    usage = {"choices": [], "usage": {"completion_tokens": 9}}
    stream = played(text("a"), text("b c"), text("", "stop"), usage, "", "[DONE]")
    assert "".join(stream.texts) == "ab c"
    assert (
        stream.ttft_s,
        stream.seconds,
        stream.finish_reason,
        stream.ended,
        stream.num_tokens,
    ) == (1.0, 3.0, "stop", True, 9)


def test_chat_with_reasoning() -> None:
    """The first thing a model that thinks says is its thinking: that is the first token."""
    stream = played(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm", content=None),
        delta(reasoning=" it", reasoning_content=" it"),
        delta(content="42"),
    )
    assert "".join(stream.texts) == "hm it42", "two names of one text"
    assert stream.ttft_s == 2.0
    assert not stream.is_whole


def test_tokens_are_counted_by_the_server_or_not_at_all() -> None:
    """llama.cpp puts usage beside the finish reason, vLLM on request on every chunk: the latest
    counts."""
    one = text("a") | {"usage": {"completion_tokens": 1}}
    two = text("b", "length") | {"usage": {"completion_tokens": 2}}
    assert played(one, two).num_tokens == 2
    assert played(text("a", "stop") | {"timings": {"predicted_n": 5}}).num_tokens == 5
    assert played(text("a", "stop") | {"timings": {"cache_n": 7}}).num_cached == 7
    details = {"prompt_tokens_details": {"cached_tokens": 8}}
    assert played(text("a", "stop") | {"usage": details}).num_cached == 8
    assert played(text("a", "stop") | {"usage": {"prompt_tokens_details": None}}).num_cached is None
    assert played(text("a", "stop") | {"usage": None}).num_tokens is None


def test_drafted_tokens_are_counted_by_timings() -> None:
    """llama.cpp leaves the count out where it drafted nothing; others give none."""
    assert played(text("a", "stop") | {"timings": {"draft_n": 5}}).num_drafted == 5
    assert played(text("a", "stop") | {"timings": {"predicted_n": 5}}).num_drafted == 0
    assert played(text("a", "stop") | {"timings": {"draft_n": "5"}}).num_drafted is None
    assert played(text("a", "stop")).num_drafted is None


def test_halves_of_characters_are_joined_or_replaced() -> None:
    """Servers that cut a text between two escapes; a lone half would make the result unwritable."""
    parts = json.loads('["\\ud83d", "\\ude00", " \\ud83d!"]')
    assert mended("".join(parts)) == "\U0001f600 \ufffd!"


@pytest.mark.parametrize(
    "event",
    ["{", "[1]", '"text"', '{"choices": {"a": 1}}', '{"choices": [1]}', "nan", "[" * 100_000],
)
def test_what_is_no_chunk(event: str) -> None:
    with pytest.raises(ServerError, match="event of the stream") as error:
        played(event)
    assert len(str(error.value)) < 200


def test_an_error_in_the_stream_is_the_servers_own() -> None:
    """It may name a status: vLLM refuses some parameters only after it has answered 200."""
    with pytest.raises(ServerError, match="EngineCore died"):
        played(text("a"), {"error": {"message": "EngineCore died", "code": 500}})
    with pytest.raises(ServerError, match="no such luck"):
        played({"error": "no such luck"})
    with pytest.raises(RequestError, match="too long"):
        played({"error": {"message": "too long", "code": 400}})
    with pytest.raises(ServerError, match="abort"):
        played(text("a"), text("", "abort"))


NAMES = (
    "choices",
    "delta",
    "text",
    "content",
    "usage",
    "timings",
    "error",
    "finish_reason",
    "completion_tokens",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES), inner),
)


@pytest.mark.slow
@given(JSON)
def test_no_json_breaks_the_reader(event: Any) -> None:
    """Whatever a server sends ends in a chunk or an error of ours."""
    with contextlib.suppress(OutriderError):
        played(json.dumps(event))


@pytest.mark.parametrize(
    ("name", "words", "facts"),
    [
        (
            "vllm",
            " He needs to buy 4*2=<<4*2=4>>4 pounds of food.\nSo he has",
            (11, 11.0, 24, "length"),
        ),
        ("llama_cpp_python", " Let $a$ be the", (6, 7.0, None, "length")),
    ],
)
def test_recorded_streams(name: str, words: str, facts: tuple[Any, ...]) -> None:
    """vLLM 0.32.0 with a draft model; llama-cpp-python 0.3.36, which sends no usage, whatever is
    asked for."""
    lines = (FIXTURES / f"{name}.sse").read_text(encoding="utf-8").splitlines()
    stream = played(*(line.removeprefix("data: ") for line in lines if line))
    assert "".join(stream.texts) == words
    assert (len(stream.texts), stream.seconds, stream.num_tokens, stream.finish_reason) == facts


def test_vllm_refuses_in_the_stream() -> None:
    lines = (FIXTURES / "vllm_refusal.sse").read_text(encoding="utf-8").splitlines()
    with pytest.raises(RequestError, match="min_p"):
        played(*(line.removeprefix("data: ") for line in lines if line))


# ---------------------------------------------------------------- a server


def ask(
    url: str,
    request: WorkloadRequest = PROMPT,
    times: int = 1,
    *,
    key: str | None = None,
    timeout_s: float = 5.0,
    reuse: bool = True,
) -> list[MeasuredAnswer | BaseException]:
    async def run() -> list[MeasuredAnswer | BaseException]:
        endpoint = ServerEndpoint.parse(url, api_key=key)
        client = Client(endpoint, timeout_s=timeout_s, reuse=reuse)
        outcomes: list[MeasuredAnswer | BaseException] = []
        for _ in range(times):
            path, body = RequestOptions().body(request, MODEL)
            outcomes += await asyncio.gather(
                client.ask(request, path, body), return_exceptions=True
            )
        await client.http.aclose()
        return outcomes

    return asyncio.run(run())


def model_of(url: str, **facts: Any) -> str:
    async def run() -> str:
        client = Client(ServerEndpoint.parse(url, **facts), timeout_s=5.0)
        return await client.model()

    return asyncio.run(run())


@pytest.mark.parametrize("request_", [PROMPT, CONVERSATION], ids=["completions", "chat"])
def test_an_answer(request_: WorkloadRequest) -> None:
    with Fake(chunk_s=0.02, first_s=0.03) as fake:
        (answer,) = ask(fake.url, request_)
    assert isinstance(answer, MeasuredAnswer)
    assert answer.text == " ".join(f"w{i}" for i in range(13))
    assert (answer.num_tokens, answer.num_chunks) == (13, 5)
    assert answer.ttft_s is not None
    assert answer.ttft_s >= 0.03
    assert answer.seconds >= 0.11
    assert answer.tpot_s == pytest.approx((answer.seconds - answer.ttft_s) / 12)


@pytest.mark.parametrize("reuse", [True, False])
def test_connections_are_used_again(reuse: bool) -> None:
    """A stream that is left at its end mark would cost every request a new connection; a server
    that closes them at any time would lose requests."""
    ports = []
    with Fake() as fake:
        server = fake.server
        assert server is not None
        original = server.process_request

        def counted(request: Any, address: Any) -> None:
            ports.append(address)
            original(request, address)

        server.process_request = counted  # type: ignore[method-assign]
        answers = ask(fake.url, times=4, reuse=reuse)
    assert all(isinstance(answer, MeasuredAnswer) for answer in answers)
    assert len(ports) == (1 if reuse else 4)


@pytest.mark.parametrize(
    ("fault", "words", "error"),
    [
        ("400", "maximum context length", RequestError),
        ("422", "Extra inputs", RequestError),
        ("429", "lower concurrency", ServerError),
        ("500", "CUDA out of memory", ServerError),
        ("html", "Bad gateway", ServerError),
        ("json", "HTTP 200", ServerError),
        ("close", "dropped", ServerError),
        ("drop", "dropped", ServerError),
        ("no-finish", "before its end", ServerError),
        ("garbage", "no chunk", ServerError),
        ("error", "EngineCore died", ServerError),
        ("refusal", "min_p is not yet supported", RequestError),
        ("abort", "gave the request up", ServerError),
        ("stall", "nothing came for 0.5 s", ServerError),
    ],
)
def test_what_a_server_can_do_wrong(fault: str, words: str, error: type[Exception]) -> None:
    """Each is one line that says what happened, and the next request is served."""
    with Fake(faults={0: fault}) as fake:
        failure, after = ask(fake.url, times=2, timeout_s=0.5)
        assert len(fake.seen) == 2, "what was sent is not sent again"
    assert type(failure) is error
    assert words in str(failure)
    assert "\n" not in str(failure)
    assert isinstance(after, MeasuredAnswer)


def test_of_a_long_message_only_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.lab.server.client.MAX_MESSAGE", 10)
    with Fake(faults={0: "html"}) as fake:
        (failure,) = ask(fake.url)
    assert str(failure).endswith("HTTP 502: <html><h1>")


@pytest.mark.parametrize("fault", ["rude", "heartbeat"])
def test_what_does_not_matter(fault: str) -> None:
    """A connection that breaks after the end mark takes nothing back; a heartbeat is nothing."""
    with Fake(faults={0: fault}) as fake:
        (answer,) = ask(fake.url)
    assert isinstance(answer, MeasuredAnswer)
    assert (answer.num_tokens, answer.num_chunks) == (13, 5)


def test_the_key_is_sent_and_cut_out_of_errors() -> None:
    with Fake(key="sk-right", faults={0: "echo"}) as fake:
        assert model_of(fake.url, api_key="sk-right") == MODEL
        with pytest.raises(ServerError, match=r"401.*--server api_key_env=NAME") as error:
            model_of(fake.url, api_key="sk-wrong")
        (failure,) = ask(fake.url, key="sk-secret")
    assert "sk-wrong" not in str(error.value)
    assert "***" in str(error.value)
    assert "bad Bearer ***" in str(failure)


def test_models_are_chosen_only_where_there_is_no_choice() -> None:
    with Fake(models=("base", "base-lora")) as fake:
        with pytest.raises(ConfigError, match="2 models"):
            model_of(fake.url)
        assert model_of(fake.url, model="base-lora") == "base-lora"
    with Fake(models=()) as fake, pytest.raises(ConfigError, match="--server server_model"):
        model_of(fake.url)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ServerError, match="is the server running"):
        model_of(f"http://127.0.0.1:{port}")
