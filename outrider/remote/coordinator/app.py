"""The coordinator's endpoints, its metrics, and the life of its process, which is that of `outrider
serve`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.remote.coordinator.fleet import Fleet
from outrider.remote.coordinator.journey import Asked, Journey
from outrider.remote.coordinator.settings import CoordinatorSettings
from outrider.serve import refusals
from outrider.serve.api.sse import ClientLeftError, unless_gone
from outrider.serve.errors import unavailable
from outrider.serve.gate import guard
from outrider.serve.observability.logs import Logging
from outrider.serve.observability.metrics import ServerMetrics
from outrider.serve.observability.metrics_families import PREFIX
from outrider.serve.run import Process, Status
from outrider.version import __version__

LOOK_S = 0.05  # between two looks whether requests are over
PASSED_ON = {
    "GET": ("/", "/openapi.json", "/v1/models", "/v1/models/{model:path}", "/v1/responses/{response_id}"),
    "POST": (
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
        "/v1/messages/count_tokens", "/tokenize", "/detokenize",
    ),
    "DELETE": ("/v1/responses/{response_id}",),
}  # fmt: skip


def run_coordinator(settings: CoordinatorSettings, status: Status = lambda line: None) -> None:
    """Serve until a signal stops it. Raises ConfigError where it cannot listen, and for TLS files
    that cannot be used."""
    logs = Logging(settings.log_format, settings.log_level)
    try:
        coordinator = Coordinator(settings)
        status(f"routing to {', '.join(settings.targets)}")
        Process(coordinator, coordinator.app, lambda: [coordinator]).run()
    finally:
        logs.close()


class Coordinator:
    """The interface that `Process` runs: an application, and requests that are under way when it
    drains."""

    name = "coordinator"

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.loading = True
        self.draining = False
        self.fleet = Fleet(settings)
        self.app = make_app(self)

    @property
    def names(self) -> list[str]:
        """A line for the log about what it serves."""
        return [target.name for target in self.fleet.targets]

    def serve(self, engines: Sequence[object], created: int) -> None:
        """Answer from now on: called in the event loop."""
        self.fleet.start()
        self.loading = False

    def drain(self, timeout_s: float) -> bool:
        """Wait for what is under way; False when time is up before that."""
        limit = time.monotonic() + timeout_s
        while self.fleet.in_flight and time.monotonic() < limit:
            time.sleep(LOOK_S)
        return not self.fleet.in_flight

    def stop(self) -> None:
        """Nothing is left to end: connections are closed with the process."""


class Relay(Response):
    """The answer that targets give to a request."""

    def __init__(self, coordinator: Coordinator, asked: Asked) -> None:
        self._coordinator = coordinator
        self._asked = asked
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        journey = Journey(self._coordinator.fleet, self._coordinator.settings, self._asked, send)
        try:
            await unless_gone(receive, journey.run())
        except (ClientLeftError, OSError):
            return


def make_app(coordinator: Coordinator) -> FastAPI:
    """Its own pages, and everything that is passed on."""
    app = FastAPI(
        title="Outrider coordinator",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    refusals.install(app)
    metrics = ServerMetrics()
    fleet = coordinator.fleet
    settings = coordinator.settings
    metrics.registry.register(FleetMetrics(fleet))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Always 200: that no target answers is no fault of this process."""
        return {"status": "ok", "replicas": [target.report() for target in fleet.targets]}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        """200 while some target takes requests."""
        _check_open(coordinator)
        if not any(target.is_usable for target in fleet.targets):
            raise unavailable(f"no target answers: {fleet.reasons()}", "no_replica")
        return {"status": "ready", "replicas": [target.report() for target in fleet.targets]}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The coordinator's version."""
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics_page() -> Response:
        """Prometheus metrics."""
        page, content_type = metrics.render()
        return Response(page, headers={"Content-Type": content_type})

    async def passed_on(request: Request) -> Response:
        """To a target, and its answer back."""
        _check_open(coordinator)
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = request.scope["raw_path"].decode("ascii")
        return Relay(
            coordinator,
            Asked(request.method, path, request.url.query, headers, await request.body()),
        )

    for method, paths in PASSED_ON.items():
        for path in paths:
            app.add_api_route(path, passed_on, methods=[method], response_model=None)
    guard(app, settings, metrics)
    return app


def _check_open(coordinator: Coordinator) -> None:
    if coordinator.loading:
        raise unavailable("the coordinator is starting", "loading")
    if coordinator.draining:
        raise unavailable("the coordinator is shutting down", "shutting_down")


class FleetMetrics(Collector):
    """The numbers of all targets at a scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        """No families in advance: they are known at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        by_target = ("replica",)
        ready = GaugeMetricFamily(
            PREFIX + "replica_ready", "Whether a target takes requests.", labels=by_target
        )
        load = GaugeMetricFamily(
            PREFIX + "replica_in_flight", "Requests at a target.", labels=by_target
        )
        lost = CounterMetricFamily(
            PREFIX + "replica_failures",
            "Requests that a target lost, by what it did.",
            labels=("replica", "kind"),
        )
        for target in self._fleet.targets:
            ready.add_metric((target.name,), float(target.is_usable))
            load.add_metric((target.name,), target.in_flight)
            for kind, count in sorted(target.failures.items()):
                lost.add_metric((target.name, kind), count)
        yield from (ready, load, lost)
        yield CounterMetricFamily(
            PREFIX + "retries",
            "Requests that continued at another target.",
            value=self._fleet.retries,
        )
        yield GaugeMetricFamily(
            PREFIX + "num_requests_waiting",
            "Requests that wait for a target.",
            value=self._fleet.waiting,
        )
