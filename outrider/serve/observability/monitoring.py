"""Everything that watches a server, after four calls, so that what starts the server need not know
what is switched on.

    monitoring = Monitoring(state.metrics, otlp_endpoint=..., log_requests=...)        before anything is loaded: it may refuse
    engine = make_engine(..., observer=monitoring.observer(name), name=name); engine.start()
    served = monitoring.ready(engine)                    self-test, gauges; what requests are submitted to from here on
    app = monitoring.around(make_app(state))      spans and traffic of HTTP requests
    monitoring.close()                                   after the last answer: writes and sends what is left
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from outrider.cache import cache_folder, keep_json, keeping, kept_json
from outrider.engine.observer import Observer, Observers
from outrider.serve.observability.logs import RequestLog
from outrider.serve.observability.metrics import ServerMetrics
from outrider.serve.observability.selftest import SelfTest, self_test
from outrider.serve.observability.telemetry import Telemetry, Traced
from outrider.serve.observability.tracing import Tracing
from outrider.serve.observability.traffic import TrafficLog
from outrider.serve.serves import Serves

TEST_VERSION = 3  # of the self-test: another one is made anew
MAX_TESTS = 200  # kept for later starts; the oldest go first


class Monitoring:
    """Raises ConfigError or CapabilityError for what cannot be: a bad address, a file that cannot
    be written, no package."""

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        otlp_endpoint: str | None = None,
        log_requests: Path | None = None,
    ) -> None:
        self.metrics = metrics
        self.self_tests: dict[str, SelfTest] = {}  # by model, for /ready
        self._tracing = None if otlp_endpoint is None else Tracing.to(otlp_endpoint)
        self._traffic = None if log_requests is None else TrafficLog(log_requests)
        self._observers: dict[str, Observers] = {}

    def observer(self, name: str) -> Observers:
        """The observer of this model's engine."""
        watching: list[Observer] = [self.metrics.observer(name), RequestLog(name)]
        if self._tracing is not None:
            watching.append(self._tracing.observer(name))
        self._observers[name] = Observers(watching)
        return self._observers[name]

    def ready(
        self,
        engine: Serves,
        *,
        test: bool = True,
        facts: dict[str, Any] | None = None,
        status: Callable[[str], None] = lambda line: None,
    ) -> Serves:
        """A started engine, before anybody else uses it: tested, the test's requests kept out of
        all numbers.

        `facts`: an earlier start with the same ones, which found nothing wrong, makes a test
        needless.
        """
        if test and (result := kept_test(facts)) is None:
            status(f"trying how {engine.name} drafts")
            with self._observers[engine.name].muted():
                result = self_test(engine)
            keep_test(facts, result)
        if test:
            assert result is not None
            result.write_log(engine.name)
            self.metrics.tested(engine.name, result)
            self.self_tests[engine.name] = result
        self.metrics.watch(engine)
        return engine if self._tracing is None else Traced(engine, self._tracing)

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application with what watches its requests."""
        if self._tracing is None and self._traffic is None:
            return app
        return Telemetry(app, tracing=self._tracing, traffic=self._traffic)

    def close(self) -> None:
        """Write and send what is left."""
        if self._tracing is not None:
            self._tracing.close()
        if self._traffic is not None:
            self._traffic.close()


def kept_test(facts: dict[str, Any] | None) -> SelfTest | None:
    """The test of an earlier start that found nothing wrong, where all these facts were the same,
    so that a server is ready the sooner. `facts`: None where tomorrow may differ from today."""
    if facts is None:
        return None
    return kept_json(_path(facts), lambda content: SelfTest([], **content, remembered=True))


def keep_test(facts: dict[str, Any] | None, result: SelfTest) -> None:
    """Remember a test without findings. An error costs that start its time, nothing else."""
    if facts is None or result.findings:
        return
    with keeping("the self-test"):
        keep_json(
            _path(facts),
            {"numbers": result.numbers, "measured_at": result.measured_at},
            max_files=MAX_TESTS,
        )


def _path(facts: dict[str, Any]) -> Path:
    content = json.dumps([TEST_VERSION, facts], sort_keys=True, default=str)
    return (
        cache_folder()
        / "self-tests"
        / f"{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.json"
    )
