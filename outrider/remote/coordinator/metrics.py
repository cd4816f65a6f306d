"""The metrics of replicas, retries and tokens: an observer's families count steps, which run in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.remote.coordinator.fleet import Fleet
from outrider.serve.observability.metrics_families import PREFIX

REPLICA = ("model_name", "replica")


class FleetMetrics(Collector):
    """A collector over all fleets. `retries`: by model, requests that went on elsewhere."""

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
