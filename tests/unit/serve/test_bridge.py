"""From the engine's thread to the event loop and back: order, cancellation when somebody leaves,
nothing lost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from outrider.engine.request import Request
from outrider.errors import QueueFullError
from outrider.sampling.params import SamplingParams
from outrider.serve.api.exchange import Bridge
from outrider.serve.api.sse import ClientLeftError, unless_gone
from outrider.serve.app import make_app
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, state_of


def requests(count: int) -> list[Request]:
    return [
        Request(id=f"r{number}", prompt=[1], params=SamplingParams(max_tokens=100))
        for number in range(count)
    ]


def test_bridge_keeps_the_order_of_each_request() -> None:
    async def collect() -> dict[int, str]:
        bridge = Bridge(FakeEngine(reply="abcdefghij"))
        bridge.submit(requests(3))
        texts: dict[int, str] = {}
        async for number, update in bridge.updates():
            texts[number] = texts.get(number, "") + update.text
        return texts

    assert asyncio.run(collect()) == dict.fromkeys(range(3), "abcdefghij")


def test_bridge_takes_all_requests_or_none() -> None:
    async def submit() -> FakeEngine:
        engine = FakeEngine(max_queue=2, gate=threading.Semaphore(0))
        bridge = Bridge(engine)
        with pytest.raises(QueueFullError):
            bridge.submit(requests(3))
        return engine

    assert sorted(asyncio.run(submit()).cancelled) == ["r0", "r1"]


def test_bridge_outlives_its_loop() -> None:
    """The engine's thread must not fail because a server's loop is closed."""
    gate = threading.Semaphore(0)
    engine = FakeEngine(gate=gate)

    async def leave() -> None:
        Bridge(engine).submit(requests(1))

    asyncio.run(leave())
    gate.release(100)
    assert engine.drain(5)


def test_work_is_cancelled_when_the_client_leaves() -> None:
    async def scenario() -> list[str]:
        seen: list[str] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        with pytest.raises(ClientLeftError):
            await unless_gone(receive, work())
        return seen

    assert asyncio.run(scenario()) == ["cancelled"]


class Connection:
    """One ASGI exchange by hand, whose client may hang up."""

    def __init__(self, app: Any, path: str, body: bytes) -> None:
        self.app = app
        self.path = path
        self.body = body
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self._asked = False

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "root_path": "",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        await self.app(scope, self.receive, self.send)


def eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_steps", [0, 1])
def test_disconnect_cancels_in_the_engine(
    stream: bool, after_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that goes on computing for nobody; the log says why there was no answer."""
    caplog.set_level("INFO", "outrider.serve")
    gate = threading.Semaphore(0)
    engine = FakeEngine(gate=gate, reply="x" * 150)
    state = state_of(engine)

    async def scenario() -> None:
        connection = Connection(
            make_app(state), "/v1/chat/completions", json.dumps(chat(n=2, stream=stream)).encode()
        )
        running = asyncio.ensure_future(connection.run())
        while len(engine.seen) < 2:
            await asyncio.sleep(0.005)
        if after_steps:
            gate.release(after_steps)
        await asyncio.sleep(0.05)
        connection.left.set()
        await asyncio.wait_for(running, 5)

    asyncio.run(scenario())
    eventually(lambda: len(engine.cancelled) == 2)
    gate.release(1000)
    assert engine.drain(5)
    reasons = [record.reason for record in caplog.records if record.getMessage() == "refused"]
    assert stream or reasons == ["the client left before its answer"]


def test_answers_of_different_clients_do_not_mix() -> None:
    engine = FakeEngine(reply=lambda request: f"seed {request.params.seed}", context=500)
    state = state_of(engine)

    async def one(app: Any, seed: int) -> str:
        connection = Connection(app, "/v1/chat/completions", json.dumps(chat(seed=seed)).encode())
        await connection.run()
        body = b"".join(message.get("body", b"") for message in connection.sent)
        return json.loads(body)["choices"][0]["message"]["content"]

    async def scenario() -> list[str]:
        app = make_app(state)
        return await asyncio.gather(*(one(app, seed) for seed in range(40)))

    assert asyncio.run(scenario()) == [f"seed {seed}" for seed in range(40)]
