"""The server as a process and with the real engine: its life from loading to draining, and OpenAI's
own client against it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.errors import ConfigError
from outrider.serve import run
from outrider.serve.app import make_app
from outrider.serve.run import Process, listen
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.serve.fake_engine import TEMPLATE, FakeEngine

REPOSITORY = Path(__file__).resolve().parents[3]


@contextmanager
def process_of(load: Any, **settings: Any) -> Iterator[tuple[Process, str]]:
    """A `Process` in a thread of this one, and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    state = ServerState(
        ServerSettings(
            models=(ServedModel(name="fake", options=Options(target="fake")),),
            port=port,
            **settings,
        )
    )
    process = Process(state, make_app(state), load)
    failures: list[BaseException] = []

    def run_it() -> None:
        try:
            process.run()
        except BaseException as error:  # noqa: BLE001  looked at by the test
            failures.append(error)

    process.failures = failures
    process.thread = thread = threading.Thread(target=run_it)
    thread.start()
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.should_exit = True
        thread.join(10)


def wait_for(url: str, status: int = 200) -> Any:
    limit = time.monotonic() + 200
    while True:
        try:
            response = httpx2.get(url)
            if response.status_code == status:
                return response
        except httpx2.TransportError:
            pass
        assert time.monotonic() < limit, f"{url} never answered {status}"
        time.sleep(0.02)


@pytest.mark.slow
def test_life_of_a_server() -> None:
    """Healthy while loading, ready when loaded; a signal lets running answers finish and nothing
    new in."""
    loaded = threading.Event()
    gate = threading.Semaphore(0)
    engine = FakeEngine(gate=gate)

    def load() -> list[FakeEngine]:
        loaded.wait(10)
        return [engine]

    answers: list[Any] = []
    with process_of(load, drain_timeout_s=20.0) as (process, url):
        wait_for(f"{url}/health")
        assert httpx2.get(f"{url}/ready").json()["error"]["code"] == "loading"
        loaded.set()
        wait_for(f"{url}/ready")
        asking = threading.Thread(
            target=lambda: answers.append(
                httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=20)
            )
        )
        asking.start()
        while not engine.seen:
            time.sleep(0.01)
        process.handle_exit(signal.SIGTERM, None)
        assert wait_for(f"{url}/ready", 503).json()["error"]["code"] == "shutting_down"
        assert httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        gate.release(1000)
        asking.join(10)
    assert answers[0].json()["choices"][0]["text"] == "Hello, world"
    assert engine.stopped
    assert not process.failures


def test_a_signal_while_models_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends; that its models are there a moment later is nobody's trouble."""
    loaded = threading.Event()
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)

    def load() -> list[FakeEngine]:
        loaded.wait(10)
        return []

    with process_of(load) as (process, url):
        wait_for(f"{url}/health")
        process.handle_exit(signal.SIGTERM, None)
    loading = next(thread for thread in threading.enumerate() if thread.name == "loading")
    loaded.set()
    loading.join(10)
    assert not failures
    assert not process.failures


def test_what_does_not_finish_in_time_is_cut_off() -> None:
    engine = FakeEngine(gate=threading.Semaphore(0))
    stop = engine.stop

    def stop_and_abort() -> None:
        for request in engine.seen:
            engine.cancel(request.id)
        stop()

    engine.stop = stop_and_abort
    answers: list[Any] = []
    with process_of(lambda: [engine], drain_timeout_s=0.1) as (process, url):
        wait_for(f"{url}/ready")
        asking = threading.Thread(
            target=lambda: answers.append(
                httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=20)
            )
        )
        asking.start()
        while not engine.seen:
            time.sleep(0.01)
        process.handle_exit(signal.SIGTERM, None)
        asking.join(10)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("signals", [1, 2])
def test_an_engine_that_hangs_does_not_keep_the_process(
    signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that never returns cannot be ended: a supervisor would have to kill the process.
    Engines beside it still end."""
    monkeypatch.setattr(run, "LAST_TURN_S", 0.3)
    hung = FakeEngine()
    other = FakeEngine(name="other")
    free = threading.Event()
    hung._alive.add("a request that never ends")
    hung.stop = free.wait
    try:
        with process_of(lambda: [hung, other], drain_timeout_s=0.1 if signals == 1 else 60.0) as (
            process,
            url,
        ):
            wait_for(f"{url}/ready")
            for _ in range(signals):
                process.handle_exit(signal.SIGTERM, None)
            limit = time.monotonic() + 10
            while process.thread.is_alive():
                assert time.monotonic() < limit, "it waits for an engine that hangs"
                time.sleep(0.01)
    finally:
        free.set()
    assert other.stopped


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("signals", [1, 2])
def test_what_is_cut_off_is_no_error(
    signals: int, streams: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a traceback for each answer under way, which took a server minutes to write."""
    monkeypatch.setattr(run, "LAST_WORDS_S", 0.3)
    engine = FakeEngine(gate=threading.Semaphore(4))
    outcomes: list[str] = []

    def ask() -> None:
        body = {"prompt": "SECRET", "stream": streams}
        try:
            with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
                outcomes.append(response.read().decode())
        except httpx2.TransportError:
            outcomes.append("cut off")

    caplog.set_level(logging.INFO)
    with process_of(lambda: [engine], drain_timeout_s=60.0 if signals == 2 else 0.1) as (
        process,
        url,
    ):
        wait_for(f"{url}/ready")
        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        until = time.monotonic() + 10
        while len(engine.seen) < len(clients) and time.monotonic() < until:
            time.sleep(0.01)
        began = time.monotonic()
        for _ in range(signals):
            process.handle_exit(signal.SIGTERM, None)
        process.thread.join(10)
        assert time.monotonic() - began < 2
    for client in clients:
        client.join(10)
    assert outcomes == ["cut off"] * 4
    assert not process.failures
    assert len(engine.cancelled) == 4
    assert not [
        record.getMessage()
        for record in caplog.records
        if record.exc_info or record.levelno >= logging.ERROR
    ]


def test_failure_to_stop_ends_the_process_with_its_error() -> None:
    engine = FakeEngine()

    def fails() -> None:
        raise OSError("no space is left for what was learned")

    engine.stop = fails
    with process_of(lambda: [engine]) as (process, url):
        wait_for(f"{url}/ready")
        process.handle_exit(signal.SIGTERM, None)
    assert [str(error) for error in process.failures] == ["no space is left for what was learned"]


def test_failure_to_load_ends_the_process_with_its_error() -> None:
    def load() -> list[FakeEngine]:
        raise ConfigError("no such model")

    with process_of(load) as (process, _):
        limit = time.monotonic() + 10
        while not process.failures and time.monotonic() < limit:
            time.sleep(0.01)
    assert [str(error) for error in process.failures] == ["no such model"]


def test_taken_port_is_reported_before_anything_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        settings = ServerSettings(
            models=(ServedModel(name="a", options=Options(target="a")),),
            port=other.getsockname()[1],
        )
        with pytest.raises(
            ConfigError, match=r"cannot listen on 127\.0\.0\.1.* give another --port"
        ):
            listen(settings)
    elsewhere = ServerSettings(models=settings.models, host="192.0.2.1", port=0)
    with pytest.raises(
        ConfigError, match=r"this machine does not have that address: give one of its own as --host"
    ):
        listen(elsewhere)


def test_an_address_of_ipv6_may_have_its_brackets() -> None:
    # else: no IPv6 here
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        models = (ServedModel(name="a", options=Options(target="a")),)
        with listen(ServerSettings(models=models, host="[::1]", port=0)) as listener:
            assert listener.getsockname()[0] == "::1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return save_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", tiny_llama(257, sharpness=4.0), tokenizer
    )


@pytest.fixture(scope="module")
def real(tiny: Path) -> Iterator[str]:
    """URL of the real engine behind the real HTTP server."""
    torch.set_num_threads(1)
    options = Options(target=str(tiny), drafter="ngram", max_model_len=256)
    settings = EngineSettings(max_num_seqs=4, kv_memory=64 << 20)

    def load() -> list[Any]:
        engine = make_engine(options, settings, extra_drafters=["suffix"], name="fake")
        engine.start()
        return [engine]

    with process_of(load) as (_, url):
        wait_for(f"{url}/ready")
        yield url


@pytest.mark.slow
def test_real_engine_says_the_same_with_and_without_speculation(real: str) -> None:
    body = {
        "prompt": "abcabcabc",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }

    def ask(**fields: Any) -> dict[str, Any]:
        response = httpx2.post(f"{real}/v1/completions", json={**body, **fields}, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    plain = ask(speculation={"mode": "off"})
    fast = ask(speculation={"mode": "fixed", "max_draft_tokens": 3})
    other = ask(speculation={"drafter": "suffix"})
    assert plain["choices"][0]["text"] == fast["choices"][0]["text"] == other["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"] is None
    assert fast["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert other["metrics"]["drafter"] == "suffix"
    seeded = [
        ask(temperature=1.0, seed=3, speculation=s)["choices"][0]["text"]
        for s in ({"mode": "off"}, {"mode": "auto"})
    ]
    assert seeded[0] == seeded[1]
    scored = ask(echo=True, max_tokens=0)["choices"][0]
    assert scored["text"] == "abcabcabc"
    assert len(scored["logprobs"]["token_logprobs"]) == 9
    form = ask(structured_outputs={"choice": ["red", "green"]}, ignore_eos=False)["choices"][0]
    assert form["text"] in ("red", "green")
    refused = httpx2.post(
        f"{real}/v1/completions", json={**body, "speculation": {"lossy": "typical"}}
    )
    assert refused.status_code == 400
    assert "not allowed" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_openais_own_client(real: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{real}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["fake"]
    ask: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 12,
        "seed": 1,
    }
    whole = client.chat.completions.create(
        **ask, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}
    )
    assert whole.usage.completion_tokens == 12
    assert len(whole.choices[0].logprobs.content) == 12
    assert whole.metrics["timing"]["ttft_s"] > 0
    stream = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    *chunks, last = stream
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks)
        == whole.choices[0].message.content
    )
    assert last.usage.completion_tokens == 12
    legacy = client.completions.create(
        model="fake", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True, n=2
    )
    assert len(legacy.choices) == 4
    raw = client.chat.completions.with_raw_response.create(**ask, extra_body={"temprature": 1})
    assert raw.headers["x-outrider-ignored-fields"] == "temprature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**ask, "model": "gpt-4"})
    asyncio.run(_async_client(openai, real, ask, whole.choices[0].message.content))


async def _async_client(openai: Any, url: str, ask: dict[str, Any], expected: str) -> None:
    """Several at once: the same seed, the same text, whatever else is in the batch."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        calls = (
            client.chat.completions.create(**ask, extra_body={"ignore_eos": True}) for _ in range(4)
        )
        answers = await asyncio.gather(*calls)
    assert [answer.choices[0].message.content for answer in answers] == [expected] * 4


@pytest.mark.slow
def test_command_drains_and_ends_with_code_0(tiny: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        str(tiny),
        "--drafter",
        "ngram",
        "--threads",
        "1",
        "--max-model-len",
        "512",
        "--port",
        str(port),
        "--kv-memory",
        "64MiB",
        "--served-model-name",
        "tiny",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/ready")
        body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(rest)
        _, err = server.communicate(timeout=30)
        assert server.returncode == 0, err
        assert "Traceback" not in err
    finally:
        server.kill()
