"""Clients that do not read: what waits for them is bounded, and their connections do not stay for
ever."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from outrider.engine.request import Update
from outrider.serve import run
from outrider.serve.api import exchange
from outrider.serve.api.exchange import Backlog, weight
from outrider.serve.app import make_app
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, state_of
from tests.unit.serve.test_bridge import Connection, eventually
from tests.unit.serve.test_run import process_of, wait_for

STEP = Update(token_ids=[1, 2], logprobs=[{1: -0.1, 3: -0.2}, {2: -0.1, 3: -0.2}])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is too much, and soon."""
    monkeypatch.setattr(exchange, "MOST", 100)
    monkeypatch.setattr(exchange, "PATIENCE_S", 0.05)


class Blocked(Connection):
    """A client that takes `takes` messages and then no more, until `reads` is set."""

    def __init__(self, app: Any, body: dict[str, Any], takes: int) -> None:
        super().__init__(app, "/v1/chat/completions", json.dumps(body).encode())
        self.reads = asyncio.Event()
        self._takes = takes

    async def send(self, message: dict[str, Any]) -> None:
        if len(self.sent) >= self._takes:
            await self.reads.wait()
        await super().send(message)


def test_weights_follow_what_is_held() -> None:
    assert weight(STEP) == 6
    assert weight(Update(token_ids=[1], prompt_logprobs=[None, {1: -0.5}, {2: -0.5, 3: -1.0}])) == 4


@pytest.mark.usefixtures("small")
def test_only_a_reader_who_holds_up_is_too_slow() -> None:
    """One that waits for the next update may have any number before it: then the server is slow
    itself."""
    waits = Backlog()
    assert all(waits.add(STEP) for _ in range(50))
    waits.ask()
    waits.give(STEP)
    assert waits.add(STEP)
    time.sleep(0.06)
    assert not waits.add(STEP)
    waits.ask()
    assert waits.add(STEP)


@pytest.mark.usefixtures("small")
def test_an_answer_ends_whose_reader_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a client that fills the memory: the rows end, what waited is let go, and a
    late reader gets an error."""
    caplog.set_level(logging.INFO, "outrider")
    gate = threading.Semaphore(0)
    engine = FakeEngine(gate=gate, reply="x" * 400, context=1000)
    body = chat(n=2, stream=True, logprobs=True, top_logprobs=5, max_tokens=400)

    async def scenario() -> str:
        connection = Blocked(make_app(state_of(engine)), body, takes=4)
        running = asyncio.ensure_future(connection.run())
        while len(engine.seen) < 2:
            await asyncio.sleep(0.005)
        for _ in range(30):
            gate.release(1)
            await asyncio.sleep(0.01)
        assert len(engine.cancelled) == 2
        connection.reads.set()
        await asyncio.wait_for(running, 5)
        return b"".join(message.get("body", b"") for message in connection.sent).decode()

    text = asyncio.run(scenario())
    gate.release(1000)
    assert engine.drain(5)
    error = json.loads(text.split("data: ")[-2])["error"]
    assert error["code"] == "slow_reader"
    assert "waited for their reader" in error["message"]
    assert "[DONE]" in text
    assert [line for line in caplog.messages if "wait for their reader" in line]


@pytest.mark.usefixtures("small")
def test_a_reader_of_few_tokens_may_take_its_time() -> None:
    engine = FakeEngine(reply="Hello, world")

    async def scenario() -> str:
        connection = Blocked(make_app(state_of(engine)), chat(stream=True), takes=2)
        running = asyncio.ensure_future(connection.run())
        await asyncio.sleep(0.3)
        connection.reads.set()
        await asyncio.wait_for(running, 5)
        return b"".join(message.get("body", b"") for message in connection.sent).decode()

    text = asyncio.run(scenario())
    pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert (
        "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
        == "Hello, world"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_that_nobody_reads_is_closed(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against answers that are kept for as long as a client likes; others are not disturbed."""
    monkeypatch.setattr(run, "STALLED_S", 0.4)
    monkeypatch.setattr(run, "STALL_LOOK_S", 0.05)
    count = 6000
    engine = FakeEngine(reply="x" * count, context=2 * count)
    body = json.dumps(
        chat(stream=stream, logprobs=True, top_logprobs=20, max_tokens=count)
    ).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: a",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join([*lines, "", ""])
    with process_of(lambda: [engine]) as (process, url):
        wait_for(f"{url}/ready")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", urlsplit(url).port))
            client.sendall(head.encode() + body)
            eventually(lambda: "its client has read nothing" in caplog.text)
            eventually(lambda: not engine._alive)
            time.sleep(0.2)
            assert httpx2.get(f"{url}/ready").status_code == 200
        assert not process.failures


@pytest.mark.slow
def test_a_connection_that_is_read_slowly_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STALLED_S", 0.4)
    monkeypatch.setattr(run, "STALL_LOOK_S", 0.05)
    count = 3000
    engine = FakeEngine(reply="x" * count, context=2 * count)
    with process_of(lambda: [engine]) as (_, url):
        wait_for(f"{url}/ready")
        body = chat(logprobs=True, top_logprobs=20, max_tokens=count)
        read = 0
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as response:
            for piece in response.iter_bytes(1 << 18):
                read += len(piece)
                time.sleep(0.1)
        assert read == int(response.headers["content-length"])
        assert read > 1 << 21
