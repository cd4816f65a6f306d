"""Targets that misbehave on demand, and a coordinator before them, each on a socket of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.remote.access import Access
from outrider.remote.coordinator.app import Coordinator
from outrider.remote.coordinator.settings import CoordinatorSettings
from outrider.serve.app import make_app
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import state_of

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
READY_S = 20.0


class Faulty:
    """An application whose answers break off or become nonsense. `after`: pieces of a body that
    come right before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.fault: str | None = None  # cut, hang, or bytes to send
        self.garbage = b""
        self.status: int | None = None  # of every answer to a request that generates
        self.after = 0
        self.times = [10**6]  # requests that the fault hits
        self.stopped = False  # answers nothing, not even probes
        self.asked = 0  # requests that generate, probes left out
        self.left = threading.Event()  # a client has gone
        self.headers: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self.stopped:
            await asyncio.sleep(3600)
        is_probe = dict(scope["headers"]).get(b"x-request-id") is None
        if scope["path"] not in GENERATING or is_probe:
            await self._app(scope, receive, send)
            return
        self.asked += 1
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        fault = self.fault if self.times[0] > 0 else None
        if self.status is not None:
            await send({"type": "http.response.start", "status": self.status, "headers": []})
            await send(
                {"type": "http.response.body", "body": b'{"error": {"message": "no", "code": "x"}}'}
            )
            return
        count = 0

        async def faulty(message: Message) -> None:
            nonlocal count
            if message["type"] == "http.response.body" and fault is not None:
                count += 1
                if count > self.after and self.times[0] > 0:
                    self.times[0] -= 1
                    await self._break(fault, send)
            await send(message)

        async def listening() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
            return message

        await self._app(scope, listening, faulty)

    async def _break(self, fault: str, send: Send) -> None:
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "garbage":
            await send({"type": "http.response.body", "body": self.garbage, "more_body": True})
            await asyncio.sleep(3600)
        raise ConnectionResetError("cut by the test")


class Live:
    """An application on a socket."""

    def __init__(self, app: ASGIApp, coordinator: Coordinator | None = None) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="critical", lifespan="off")
        )
        self._thread = threading.Thread(target=self._run, args=(coordinator,), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def _run(self, coordinator: Coordinator | None) -> None:
        async def serve() -> None:
            if coordinator is not None:
                coordinator.serve([], 0)
            await self._server.serve()

        asyncio.run(serve())

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)


class Setting:
    """Targets, their coordinator, and a client."""

    def __init__(
        self,
        targets: list[Faulty],
        addresses: list[str],
        coordinator: Coordinator,
        client: httpx2.Client,
    ) -> None:
        self.targets = targets
        self.addresses = addresses
        self.coordinator = coordinator
        self.client = client

    def standings(self) -> list[str]:
        return [target.standing for target in self.coordinator.fleet.targets]

    def until(self, *standings: str) -> None:
        limit = time.monotonic() + READY_S
        while self.standings() != list(standings):
            assert time.monotonic() < limit, (self.standings(), self.coordinator.fleet.reasons())
            time.sleep(0.01)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"outrider:{name}")
        )


@contextmanager
def coordinated(
    *engines: FakeEngine,
    ready: bool = True,
    token: str | None = None,
    keys: tuple[str, ...] = (),
    **settings: Any,
) -> Iterator[Setting]:
    """A coordinator before a target for each engine. `token`: of the coordinator's calls; `keys`:
    that targets ask for."""
    with ExitStack() as stack:
        targets = []
        addresses = []
        for engine in engines:
            faulty = Faulty(make_app(state_of(engine, api_keys=keys)))
            live = Live(faulty)
            stack.callback(engine.stop)
            stack.callback(live.stop)
            targets.append(faulty)
            addresses.append(live.address)
        given = {"stall_s": 1.0, "wait_s": 1.0, **settings}
        access = Access(token=token)
        coordinator = Coordinator(
            CoordinatorSettings(targets=tuple(addresses), access=access, **given)
        )
        live = Live(coordinator.app, coordinator)
        stack.callback(live.stop)
        client = stack.enter_context(
            httpx2.Client(base_url=live.address, timeout=30, trust_env=False)
        )
        setting = Setting(targets, addresses, coordinator, client)
        if ready:
            setting.until(*["ready"] * len(engines))
        yield setting
