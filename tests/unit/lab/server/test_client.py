"""The client against a server that behaves, and one that does not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from outrider.errors import ConfigError, RequestError, ServerError
from outrider.lab.server.client import Client, raised
from outrider.lab.server.discover import discover
from outrider.lab.server.options import LoadOptions, ServerEndpoint
from outrider.lab.server.types import Failure, MeasuredAnswer, ServerInfo
from outrider.lab.workload.types import WorkloadRequest
from tests.unit.lab.server.fake_server import MODEL, Fake

PROMPT = WorkloadRequest(id="p1", prompt="Hello")
CONVERSATION = WorkloadRequest(id="p2", messages=({"role": "user", "content": "Hello"},))


def ask(
    url: str, request: WorkloadRequest = PROMPT, times: int = 1, *, key: str | None = None, timeout_s: float = 5.0
) -> list[MeasuredAnswer | Failure]:
    async def run() -> list[MeasuredAnswer | Failure]:
        async with Client(ServerEndpoint.parse(url, api_key=key), timeout_s=timeout_s) as client:
            return [await client.ask(request.id, *LoadOptions().body(request, MODEL)) for _ in range(times)]

    return asyncio.run(run())


def found(url: str, **facts: Any) -> ServerInfo:
    async def run() -> ServerInfo:
        async with Client(ServerEndpoint.parse(url, **facts), timeout_s=5.0) as client:
            return await discover(client)

    return asyncio.run(run())


@pytest.mark.parametrize("request_", [PROMPT, CONVERSATION], ids=["completions", "chat"])
def test_an_answer(request_: WorkloadRequest) -> None:
    with Fake(chunk_s=0.02, first_s=0.03, cached=4) as fake:
        (answer,) = ask(fake.url, request_)
    assert isinstance(answer, MeasuredAnswer)
    assert answer.text == " ".join(f"w{i}" for i in range(13))
    assert (answer.num_tokens, answer.num_prompt_tokens, answer.num_cached_tokens) == (13, 10, 4)
    assert answer.finish_reason == "length"
    assert len(answer.chunks_s) == 5
    assert answer.ttft_s is not None
    assert answer.ttft_s >= 0.03
    assert len(answer.gaps_s) == 4
    assert sorted(answer.gaps_s)[2] > 0.01
    assert answer.seconds >= answer.chunks_s[-1] >= 0.11
    assert answer.tpot_s == pytest.approx((answer.seconds - answer.ttft_s) / 12)


def test_connections_are_used_again() -> None:
    """A stream that is left at its end mark would cost every request a new connection."""
    ports = []
    with Fake() as fake:
        server = fake.server
        assert server is not None
        original = server.process_request

        def counted(request: Any, address: Any) -> None:
            ports.append(address)
            original(request, address)

        server.process_request = counted  # type: ignore[method-assign]
        answers = ask(fake.url, times=4)
    assert all(isinstance(answer, MeasuredAnswer) for answer in answers)
    assert len(ports) == 1


def failure_of(fault: str, **facts: Any) -> Failure:
    with Fake(faults={0: fault}) as fake:
        failure, after = ask(fake.url, times=2, **facts)
    assert isinstance(failure, Failure)
    assert isinstance(after, MeasuredAnswer), "the next request is served"
    assert "\n" not in failure.message
    return failure


@pytest.mark.parametrize(
    ("fault", "kind", "status", "words", "error"),
    [
        ("400", "status", 400, "maximum context length", RequestError),
        ("422", "status", 422, "Extra inputs", RequestError),
        ("429", "status", 429, "lower concurrency", ServerError),
        ("500", "status", 500, "CUDA out of memory", ServerError),
        ("html", "status", 502, "Bad gateway", ServerError),
        ("json", "malformed", None, "application/json instead of a stream", ServerError),
        ("close", "dropped", None, "dropped", ServerError),
        ("drop", "dropped", None, "dropped", ServerError),
        ("no-finish", "dropped", None, "before its end", ServerError),
        ("garbage", "malformed", None, "not JSON", ServerError),
        ("list", "malformed", None, "no JSON object", ServerError),
        ("error", "aborted", 500, "EngineCore died", ServerError),
        ("refusal", "aborted", 400, "min_p is not yet supported", RequestError),
        ("abort", "aborted", None, "gave the request up", ServerError),
    ],
)
def test_what_a_server_can_do_wrong(
    fault: str, kind: str, status: int | None, words: str, error: type[Exception]
) -> None:
    """Each is one line that says what happened, and never an exception out of the client."""
    failure = failure_of(fault)
    assert (failure.kind, failure.status) == (kind, status)
    assert words in failure.message
    assert type(raised(failure)) is error


def test_a_drop_says_how_far_it_came() -> None:
    assert failure_of("drop").num_chunks == 2
    assert failure_of("close").num_chunks == 0


def test_a_server_that_stalls() -> None:
    failure = failure_of("stall", timeout_s=0.3)
    assert failure.kind == "timeout"
    assert "0.3 s" in failure.message


def test_what_happens_after_the_end_mark_does_not_matter() -> None:
    """Text, reason and usage have come: a connection that breaks then takes nothing back."""
    with Fake(faults={0: "rude"}) as fake:
        answer, after = ask(fake.url, times=2)
    assert isinstance(answer, MeasuredAnswer)
    assert answer.num_tokens == 13
    assert isinstance(after, MeasuredAnswer)


def test_heartbeats_do_not_disturb() -> None:
    with Fake(faults={0: "heartbeat"}) as fake:
        (answer,) = ask(fake.url)
    assert isinstance(answer, MeasuredAnswer)
    assert len(answer.chunks_s) == 5


def test_usage_that_is_missing_is_not_made_up() -> None:
    with Fake(usage=False) as fake:
        (answer,) = ask(fake.url)
    assert isinstance(answer, MeasuredAnswer)
    assert answer.num_tokens is None
    assert answer.tpot_s is None


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again, as no server can notice that, and then reported."""
    pauses = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    (failure,) = ask(f"http://127.0.0.1:{free_port()}")
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
    assert "is the server running" in failure.message
    assert [pause for pause in pauses if pause] == [0.2, 1.0]


def test_a_request_that_was_sent_is_not_sent_again() -> None:
    """A retry after bytes went out would be counted twice by the server."""
    with Fake(faults={0: "close"}) as fake:
        ask(fake.url)
        assert len(fake.seen) == 1


def test_the_environments_proxy_is_not_asked_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    with Fake() as fake:
        (answer,) = ask(fake.url)
    assert isinstance(answer, MeasuredAnswer)


def test_the_key_is_sent_and_cut_out_of_errors() -> None:
    with Fake(key="sk-right") as fake:
        assert found(fake.url, api_key="sk-right").model == MODEL
        with pytest.raises(ServerError, match=r"401.*--set api_key_env=NAME") as error:
            found(fake.url, api_key="sk-wrong")
    assert "sk-wrong" not in str(error.value)
    assert "***" in str(error.value)
    assert "environment variable" in str(error.value)


def test_a_failures_message_does_not_hold_the_key() -> None:
    with Fake(faults={0: "echo"}) as fake:
        (failure,) = ask(fake.url, key="sk-secret")
    assert isinstance(failure, Failure)
    assert failure.message.endswith("bad Bearer ***")


@pytest.mark.parametrize(
    ("engine", "version"), [("vllm", "1.2.3"), ("sglang", "1.2.3"), ("llamacpp", "b9999-abc"), ("outrider", "1.2.3")]
)
def test_engines_are_recognised(engine: str, version: str) -> None:
    with Fake(engine=engine) as fake:
        info = found(fake.url)
    assert (info.engine, info.version, info.model, info.metrics, info.notes) == (engine, version, MODEL, True, [])


def test_a_server_without_counters_says_how_to_get_them() -> None:
    with Fake(engine="llamacpp", metrics=False) as fake:
        info = found(fake.url)
    assert (info.engine, info.metrics) == ("llamacpp", False)
    assert "--metrics" in info.notes[0]


def test_an_api_with_a_title_is_called_by_it() -> None:
    """llama-cpp-python calls the owner of its model "me". A title that nobody chose is none."""
    with Fake(engine="me", metrics=False, title="llama.cpp Python API") as fake:
        info = found(fake.url)
        assert (info.engine, info.version) == ("llama.cpp Python API", "0.3")
        fake.title = "FastAPI"
        info = found(fake.url)
        assert (info.engine, info.version) == ("me", None)
    with Fake(engine="vllm", title="llama.cpp Python API") as fake:
        info = found(fake.url)
        assert (info.engine, info.version) == ("vllm", "1.2.3")


def test_an_unknown_engine_keeps_its_own_name() -> None:
    with Fake(engine="acme") as fake:
        info = found(fake.url)
    assert (info.engine, info.version, info.metrics) == ("acme", None, False)


def test_models_are_chosen_only_where_there_is_no_choice() -> None:
    with Fake(models=("base", "base-lora")) as fake:
        with pytest.raises(ConfigError, match="2 models"):
            found(fake.url)
        with pytest.raises(ConfigError, match="Did you mean 'base-lora'"):
            found(fake.url, model="base-lara")
        assert found(fake.url, model="base-lora").model == "base-lora"
    with Fake(models=()) as fake:
        with pytest.raises(ConfigError, match="does not list"):
            found(fake.url)
        assert found(fake.url, model="any").model == "any"


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ServerError, match="is the server running"):
        found(f"http://127.0.0.1:{free_port()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
