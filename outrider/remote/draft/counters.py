"""The numbers of a draft service under their public names, as prometheus_client keeps them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.remote.protocol import messages

PREFIX = "outrider:draft_service"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class DraftCounters:
    """Counters, histograms and gauges of one service. Any thread may add."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(f"{PREFIX}_requests", "Messages about rows.", registry=registry)
        self.drafted = Counter(
            f"{PREFIX}_drafted_nodes",
            "Nodes sent as continuations of committed texts.",
            registry=registry,
        )
        self.stale = Counter(
            f"{PREFIX}_stale",
            "Drafts that were dropped because a newer text arrived.",
            registry=registry,
        )
        self.evictions = Counter(
            f"{PREFIX}_evictions", "Rows forgotten for memory.", registry=registry
        )
        self._troubles = Counter(
            f"{PREFIX}_troubles", "Messages answered with a trouble.", ["reason"], registry=registry
        )
        self.batch = Histogram(
            f"{PREFIX}_batch_rows", "Rows of one drafting call.", buckets=BATCHES, registry=registry
        )
        self.seconds = Histogram(
            f"{PREFIX}_call_seconds", "One drafting call.", buckets=SECONDS, registry=registry
        )
        self.streams = Gauge(f"{PREFIX}_streams", "Open calls of askers.", registry=registry)

    def trouble(self, kind: messages.Trouble) -> None:
        """A message was answered with this."""
        self._troubles.labels(messages.Trouble.Name(kind).removeprefix("TROUBLE_").lower()).inc()

    def watch(self, rows: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Show how many rows are kept, and how many drafts are waited for."""
        for name, text, count in (
            ("rows", "Texts that are kept.", rows),
            ("waiting", "Drafts that are wanted.", waiting),
        ):
            Gauge(f"{PREFIX}_{name}", text, registry=self.registry).set_function(count)
