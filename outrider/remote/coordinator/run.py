"""The life of a coordinator: `outrider serve`'s own process and application, with engines that are target services.

It reads tokenizers and no weights. It is ready when every model has a replica; it waits for one without limit, and logs every
half minute what it waits for.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.demo import demo_paths
from outrider.models.loading.load import load_tokenizer
from outrider.models.source import resolve
from outrider.options import DEMO
from outrider.remote.coordinator.engine import Carriage, RemoteEngine
from outrider.remote.coordinator.fleet import Fleet
from outrider.remote.coordinator.settings import CoordinatorSettings
from outrider.remote.identity import model_identity
from outrider.serve.observability.metrics_families import PREFIX
from outrider.serve.observability.monitoring import Monitoring
from outrider.serve.run import Status, run_server
from outrider.serve.served import ServerState, Serves
from outrider.serve.settings import ServedModel

log = logging.getLogger("outrider.service")
LOOK_S = 0.1  # between two looks whether a replica was admitted
REMIND_S = 30.0
REPLICA = ("model_name", "replica")


def run_coordinator(
    settings: CoordinatorSettings, status: Status = lambda line: None, notes: Sequence[str] = ()
) -> None:
    """Serve until a signal stops it; `notes` go to the log. Raises ConfigError where it cannot listen, and what reading
    tokenizers raises.
    """
    with Coordinator(settings) as coordinator:

        def load(state: ServerState, monitoring: Monitoring, status: Status) -> Sequence[Serves]:
            for note in notes:
                log.info(note)
            return coordinator.load(state, monitoring, status)

        run_server(settings.server, status, load)


class Coordinator:
    """All fleets of one coordinator, and the loop they live in. A context manager: it ends its connections."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._carriage = Carriage()
        self._over = threading.Event()
        self.fleets: dict[str, Fleet] = {}
        self._engines: dict[str, RemoteEngine] = {}

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *why: object) -> None:
        self._over.set()
        for fleet in self.fleets.values():
            self._carriage.result(fleet.close(), 10.0)
        self._carriage.close()

    def load(self, state: ServerState, monitoring: Monitoring, status: Status) -> Sequence[Serves]:
        """Engines of all models, once each has a replica. In a thread: it waits."""
        tokenizers = {}
        for model in self._settings.server.models:
            status(f"reading the tokenizer of {model.name}")
            tokenizers[model.name] = _tokenizer(model)
            self.fleets[model.name] = self._carriage.result(self._started(model, tokenizers[model.name]))
        state.replicas = lambda: {name: fleet.report() for name, fleet in self.fleets.items()}
        state.metrics.registry.register(FleetMetrics(self.fleets, lambda: {n: e.retries for n, e in self._engines.items()}))
        found = []
        for name, fleet in self.fleets.items():
            self._wait_for(fleet)
            engine = RemoteEngine(
                fleet, tokenizers[name], self._carriage, monitoring.observer(name), self._settings.limits,
                max_queue=self._settings.max_queue, headers=monitoring.trace_headers,
                emitted=state.metrics.observer(name).emitted,
            )  # fmt: skip
            self._engines[name] = engine
            found.append(monitoring.ready(engine, test=False))
        return found

    async def _started(self, model: ServedModel, tokenizer: Any) -> Fleet:
        settings = self._settings
        fleet = Fleet(
            model.name, settings.endpoints[model.name], settings.security, model_identity(model.name, tokenizer, len(tokenizer)),
            settings.patience, instance=uuid.uuid4().hex, hold_s=settings.limits.wait_s,
        )  # fmt: skip
        fleet.start()
        return fleet

    def _wait_for(self, fleet: Fleet) -> None:
        waited_s = 0.0
        while fleet.known is None and not self._over.wait(LOOK_S):
            waited_s += LOOK_S
            if waited_s >= REMIND_S:
                waited_s = 0.0
                log.warning("waiting for a replica of '%s': %s", fleet.name, fleet.reasons())
        if fleet.known is None:
            raise SystemExit  # the process ends; nobody waits for this thread


def _tokenizer(model: ServedModel) -> Any:
    options = model.options
    name = str(demo_paths()[0]) if options.target == DEMO else options.target
    return load_tokenizer(resolve(name, options.revision), options.trust_remote_code)


class FleetMetrics(Collector):
    """The numbers of all replicas at a scrape. `retries`: by model, requests that went on elsewhere."""

    def __init__(self, fleets: Mapping[str, Fleet], retries: Callable[[], Mapping[str, int]]) -> None:
        self._fleets, self._retries = fleets, retries

    def describe(self) -> list[Metric]:
        """No families in advance: they are known at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        ready = GaugeMetricFamily(PREFIX + "replica_ready", "Whether a replica takes requests.", labels=REPLICA)
        load = GaugeMetricFamily(PREFIX + "replica_in_flight", "Requests of this coordinator at a replica.", labels=REPLICA)
        lost = CounterMetricFamily(
            PREFIX + "replica_failures", "Requests that a replica lost, by what it did.", labels=(*REPLICA, "kind")
        )
        again = CounterMetricFamily(PREFIX + "retries", "Requests that went on at another replica.", labels=("model_name",))
        for name, fleet in self._fleets.items():
            for replica in fleet.replicas:
                ready.add_metric((name, replica.name), float(replica.is_usable))
                load.add_metric((name, replica.name), replica.in_flight)
                for kind, count in sorted(replica.failures.copy().items()):
                    lost.add_metric((name, replica.name, kind), count)
        for name, count in self._retries().items():
            again.add_metric((name,), count)
        yield from (ready, load, lost, again)
