"""A server of fake engines for tests: `with serving(FakeEngine()) as client: client.post(...)`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from outrider.build import Options
from outrider.serve.app import make_app
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from tests.unit.serve.fake_engine import FakeEngine


def state_of(*engines: FakeEngine, **settings: Any) -> ServerState:
    models = tuple(
        ServedModel(name=engine.name, options=Options(target=engine.name)) for engine in engines
    )
    state = ServerState(ServerSettings(models=models, **settings))
    state.serve(engines, created=1_700_000_000)
    return state


@contextmanager
def serving(*engines: FakeEngine, **settings: Any) -> Iterator[TestClient]:
    state = state_of(*engines, **settings)
    with TestClient(make_app(state), raise_server_exceptions=False) as client:
        client.state = state
        yield client
    for engine in engines:
        engine.stop()


@contextmanager
def listening(*engines: FakeEngine, **settings: Any) -> Iterator[str]:
    """The application behind a real socket, for clients that bring their own HTTP; yields the
    address."""
    server = uvicorn.Server(
        uvicorn.Config(make_app(state_of(*engines, **settings)), port=0, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        for engine in engines:
            engine.stop()


def events(response: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; checks its frame."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def chat(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}
